"""Libraries that grow and merge like files.

A *branch* is a handful of new experts in every layer of a trained model, with their keys: it has learned one text, and
nothing of the model that it was grown on, its *base*, has changed. Branches of a base stand side by side in one model.

    grown = some_moe.grow("runs/base", data="law.jsonl", out="runs/law")
    merged = some_moe.merge(["runs/law", "runs/code"], out="runs/both")
    alone = some_moe.prune("runs/both", "law", out="runs/code-again")
"""
