"""Open a run from Python: its figures, its logits, the experts of a text, its analysis and its page.

python examples/open_a_run.py runs/demo --text "Once upon a time"
"""

import argparse

import torch

import some_moe
from some_moe.data.tokenizer import BOS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--text", default="Once upon a time")
    parser.add_argument("--max-tokens", type=int, default=20_000, help="how much of the valid split is replayed")
    options = parser.parse_args()

    run = some_moe.load(options.run)  # figures at once; weights when .model is first used
    print(run)

    tokens = torch.tensor([[BOS, *run.tokenizer.encode(options.text)]])
    with torch.no_grad():
        output = run.model(tokens)  # .logits (1, time, vocabulary), .routings: one a SoME layer
    likeliest = output.logits[0, -1].softmax(-1).topk(3)
    for share, token in zip(likeliest.values.tolist(), likeliest.indices.tolist(), strict=True):
        print(f"{options.text!r} goes on with {run.tokenizer.decode([token])!r}: {share:.1%}")
    print(f"experts of the last token in the first layer: {output.routings[0].experts[0, -1].tolist()}")

    trace = some_moe.trace(run, options.text)  # html="trace.html" writes a page that can be explored
    print(f"\n{trace}")

    # guilds=False: the tests of guilds take longest
    found = some_moe.analyze(run, guilds=False, max_tokens=options.max_tokens)
    for layer in found.findings["layers"]:
        print(f"layer {layer['layer']}: gini {layer['gini']:.2f}")

    report = some_moe.report(run)  # the analysis is there already, and is not made again
    print("written:", *report.paths)


if __name__ == "__main__":
    main()
