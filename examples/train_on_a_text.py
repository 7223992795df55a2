"""Train a small model on a text file, and let it write.

python examples/train_on_a_text.py my.txt --steps 400 --out runs/my-text

Documents end at a blank line or at <|endoftext|>. Without a file it writes one, of generated stories. The same command
again goes on with an interrupted run.
"""

import argparse
from pathlib import Path

import some_moe
from some_moe import DataConfig, GravityConfig, ModelConfig, RunConfig, TrainConfig
from some_moe.stories.generator import tell_many


def write_stories(path: Path, count: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(story.text for story in tell_many(count)), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/text"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--stories", type=int, default=1000, help="how many to write where no text is given")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--prompt", default="One morning")
    options = parser.parse_args()

    text = options.text
    if text is None:
        text = options.out.with_name(f"{options.out.name}.txt")
        write_stories(text, options.stories)
    config = RunConfig(
        name=options.out.name,
        model=ModelConfig(
            d_model=options.width,
            num_layers=2,
            num_heads=4,
            vocab_size=2048,
            num_experts=16,
            d_ffn=options.width,
            top_k=2,
        ),
        gravity=GravityConfig(balance_rate=0.01),
        data=DataConfig(source=str(text), seq_len=256, batch_size=8),
        train=TrainConfig(epochs=100, max_steps=options.steps, learning_rate=5e-3, log_every=10, sample_tokens=40),
    )
    run = some_moe.train(config, out=options.out, resume="auto", display=False)

    for line in run.metrics:
        if "val_loss" in line:
            print(f"step {line['step']}: val_loss {line['val_loss']:.3f}")
    result = run.result
    print(f"test_loss {result['test_loss']:.3f} nats a token; valid split {result['bits_per_byte']:.3f} bits a byte")
    for layer in result["layers"]:
        used = f"{layer['experts_used']} of {layer['num_experts']} experts used"
        print(f"layer {layer['layer']}: {used}, gini {layer['gini']:.2f}")
    print(f"\n{options.prompt}{''.join(run.generate(options.prompt, 60, seed=1))}")


if __name__ == "__main__":
    main()
