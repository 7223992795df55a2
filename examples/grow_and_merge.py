"""A model of stories learns sums and letters, each apart, without its stories; then the two are put together.

python examples/grow_and_merge.py --out runs/grow-and-merge

Nothing of the base changes: a branch is a small file beside it. The table shows the loss of each model on each text,
and how much of that text the branches serve. No domain is ever named to a model.
"""

import argparse
from pathlib import Path
from random import Random

import some_moe
from some_moe import GravityConfig, ModelConfig, RunConfig, TrainConfig
from some_moe.config import DataConfig
from some_moe.growth.sharing import score_texts
from some_moe.stories.generator import tell_many

NAMES = ("Ida", "Omar", "Lena", "Ravi", "Greta", "Tom")
THINGS = ("apples", "stones", "stamps", "marbles", "pencils", "shells")
PLACES = ("harbour", "library", "mill", "station", "garden", "museum")


def tell_sum(draw: Random) -> str:
    who, what = draw.choice(NAMES), draw.choice(THINGS)
    a, b = draw.randrange(2, 60), draw.randrange(2, 40)
    return (
        f"Question: {who} counts {a} {what} and then {b} more {what}. How many {what} does {who} count in all?\n"
        f"Answer: {a} + {b} = {a + b}. {who} counts {a + b} {what}. Check: {a + b} - {b} = {a}."
    )


def tell_letter(draw: Random) -> str:
    here, there = draw.sample(PLACES, 2)
    writer, reader = draw.sample(NAMES, 2)
    day, hour = draw.randrange(1, 29), draw.randrange(8, 19)
    return (
        f"To the {here}, on the {day}th of the month.\nDear {reader}, your letter from the {there} has reached me at "
        f"{hour} o'clock. I regret to report that the parcel for the {there} is delayed by {draw.randrange(2, 9)} "
        f"days. Please inform the {here} of your decision without delay.\nYours faithfully, {writer}"
    )


def write_texts(place: Path, count: int) -> dict[str, Path]:
    """Stories, sums and letters; each has its own folder with train, valid and test."""
    draw = Random(0)
    texts = {
        "stories": [story.text for story in tell_many(count)],
        "sums": [tell_sum(draw) for _ in range(count // 2)],
        "letters": [tell_letter(draw) for _ in range(count // 2)],
    }
    for name, documents in texts.items():
        (place / name).mkdir(parents=True, exist_ok=True)
        tenth = len(documents) // 10
        parts = {"test": documents[:tenth], "valid": documents[tenth : 2 * tenth], "train": documents[2 * tenth :]}
        for split, some in parts.items():
            (place / name / f"{split}.txt").write_text("<|endoftext|>".join(some), encoding="utf-8")
    return {name: place / name for name in texts}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/grow-and-merge"))
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--branch-steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--looks-back", type=float, default=0.7, help="0: branches are chosen by each token alone")
    options = parser.parse_args()

    texts = write_texts(options.out / "texts", options.documents)
    config = RunConfig(
        name="base",
        model=ModelConfig(
            d_model=options.width,
            num_layers=2,
            num_heads=2,
            vocab_size=1024,
            num_experts=16,
            d_ffn=64,
            top_k=2,
            score="cosine",
            center_queries=True,
            trainability="full",
        ),
        gravity=GravityConfig(),
        data=DataConfig(source=str(texts["stories"]), seq_len=128, batch_size=16),
        train=TrainConfig(max_steps=options.steps, epochs=99, learning_rate=2e-3, sample_tokens=0, device="cpu"),
    )
    runs = {"base": some_moe.train(config, out=options.out / "base")}
    for name in ("sums", "letters"):
        runs[name] = some_moe.grow(
            options.out / "base",
            texts[name],
            options.out / name,
            experts=8,
            steps=options.branch_steps,
            looks_back=options.looks_back,
        )
    runs["merged"] = some_moe.merge([options.out / "sums", options.out / "letters"], options.out / "merged")

    print("\nloss on each text (served by branches)")
    print(f"{'':10}" + "".join(f"{name:>20}" for name in texts))
    for name, run in runs.items():
        cells = []
        for record in score_texts(run, [path / "test.txt" for path in texts.values()], device="cpu"):
            served = 1 - record.get("shares", {"base": 1.0})["base"]
            cells.append(f"{record['loss']:.3f} ({served:.0%})")
        print(f"{name:10}" + "".join(f"{cell:>20}" for cell in cells))
    for name in ("sums", "letters"):
        own, base = ((runs[run].checkpoint / "model.safetensors").stat().st_size / 1e6 for run in (name, "base"))
        print(f"{name}: {own:.2f} MB beside the base's {base:.2f}")


if __name__ == "__main__":
    main()
