"""What is read, and how it is learned."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from some_moe.config.base import Config, Count, Decay, Natural, NonNegative, Positive, Seed, Share

MOST_STORIES = 5_000_000  # that are generated for a run: each takes about a kilobyte and a millisecond


class DataConfig(Config):
    """What is read, how it is cut into rows, and which positions count."""

    any_text = ("separator",)

    source: str = "stories"
    """`stories` (generated), a .txt, .md, .json, .jsonl or .parquet file or a folder of them, or hf:OWNER/NAME."""
    text_field: Annotated[str, Field(min_length=1)] = "text"
    """The field or column that holds the text, in .json, .jsonl, .parquet and hf: sources."""
    seq_len: Annotated[int, Field(ge=2, le=1 << 20)] = 384
    """Longest row, in tokens."""
    long: Literal["auto", "cut", "split"] = "auto"
    """A document longer than seq_len is cut, or split into rows; auto splits own texts of new runs, else it cuts."""
    separator: str = ""
    """What ends a document in a .txt file; empty means <|endoftext|> where it occurs, else a blank line."""
    tokenizer: str | None = None
    """A tokenizer.json to use; null trains one on the training stories."""
    batch_size: Count = 32
    """Rows in a batch."""
    batching: Literal["bucketed", "padded", "packed"] = "bucketed"
    """One story a row with neighbours of like length; every row padded to seq_len; or rows filled with stories."""
    train_subset_size: Count | None = None
    """Use at most so many training stories; null is all."""
    val_subset_size: Count | None = None
    """Use at most so many validation stories, and as many test stories; null is all."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Threads that lay batches out."""
    prefetch: Annotated[int, Field(ge=0, le=1000)] = 4
    """Batches laid out ahead of the one in use."""
    loss_on: Literal["text", "all_positions"] = "text"
    """What the training loss averages over: real tokens, or padding too (the reports' v2–v4; needs padded rows)."""
    count_padding: bool = False
    """Padding positions count in usage, gini, entropy and gravity (the reports' v2–v4; needs padded rows)."""

    def find_problems(self) -> Iterator[str]:
        sizes = {"train_subset_size": self.train_subset_size or 0, "val_subset_size": self.val_subset_size or 0}
        for name, size in sizes.items():
            if self.source == "stories" and size > MOST_STORIES:
                need = f"{size / 1e6:,.0f} GB of memory and {size / 3.6e6:,.0f} hours"
                yield f"{name} {size} generated stories would need {need}; ask for {MOST_STORIES:,} at most"
        padded = {"loss_on: all_positions": self.loss_on != "text", "count_padding": self.count_padding}
        for name, wanted in padded.items():
            if wanted and self.batching != "padded":
                yield f"{name} needs rows of one length; set batching: padded, not {self.batching}"


class TrainConfig(Config):
    """How it is learned."""

    learning_rate: Positive = 6e-4
    """Highest learning rate."""
    epochs: Annotated[int, Field(ge=1, le=10**6)] = 4
    """Passes over the training stories."""
    max_steps: Count | None = None
    """Stop after so many optimizer steps, even within an epoch; null is no limit."""
    global_batch_tokens: Count | None = None
    """Positions a step, reached by accumulating gradients over batches; null is one batch a step."""
    beta2: Decay = 0.95
    """AdamW's memory of squared gradients; short runs want a short one."""
    weight_decay: NonNegative = 0.1
    """AdamW's decay."""
    decay_on: Literal["matrices", "all"] = "matrices"
    """What decays: matrices alone, or every parameter as a plain AdamW would."""
    warmup: Share = 0.03
    """Share of the steps over which the rate rises from 0; then it falls along a half cosine."""
    min_rate_share: Share = 0.1
    """The rate at the end, as a share of learning_rate."""
    clip: NonNegative = 1.0
    """Largest norm of the gradient; 0 is no clipping."""
    top_k_warmup: Share = 0.0
    """Share of the steps with one expert a token; then k rises to top_k over top_k_ramp of the steps."""
    top_k_ramp: Share = 0.0
    """Share of the steps over which k rises from 1 to top_k after top_k_warmup."""
    seed: Seed = 0
    """Everything random but the expert weights follows from it."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    threads: Annotated[int, Field(ge=1, le=256)] | None = None
    """Threads that compute on a CPU, of which the last bits depend; null is torch's choice, one a core."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 layers with fp32 weights, or fp32 throughout; auto is bf16 on a GPU and fp32 on a CPU."""
    fast: Literal["auto", "off"] = "auto"
    """On a CUDA GPU use the fast model (the same parameters, fused kernels, captured steps), or the plain one."""
    compile: bool | None = None
    """Use torch.compile, and capture steps to replay them. null: in the fast model steps are captured from 20 steps on,
    and compiled from 20,000 on, for its kernels leave the compiler little to gain."""
    kernel: Literal["auto", "reference", "cpu", "grouped", "triton"] = "auto"
    """Which implementation computes the experts; auto takes the fastest one for the device."""
    expert_parallel: Literal["off", "machine", "all"] = "off"
    """Several processes: each has all experts; or those of a machine, or all of them, have a share each."""
    fsdp: bool = False
    """Several processes: each keeps a share of what is trained, of its gradients and of AdamW's memory (FSDP2)."""
    checkpoint_activations: bool = False
    """Recompute each block in the backward pass: less memory, more time."""
    deterministic: bool = False
    """Refuse every operation that may not repeat to the bit (a CPU repeats without it)."""
    log_every: Count = 10
    """Write a line of metrics every so many steps."""
    eval_every: Natural = 0
    """Evaluate every so many steps too, not only at the end of each epoch; 0 is off."""
    early_stop: Natural = 0
    """Stop after so many evaluations in a row without a better one; 0 is off."""
    save_every: Natural = 200
    """Save a checkpoint every so many steps too, not only after an evaluation; 0 is off."""
    keep_last: Count = 2
    """Checkpoints kept, besides the best one."""
    checkpoints: Literal["all", "weights", "best"] = "all"
    """What is saved: all that resuming needs; weights alone; or the best weights alone, in memory until the end."""
    snapshot_every: Natural = 100
    """Keep the keys every so many steps, to see them move; 0 keeps none."""
    sample_every: Natural = 0
    """Write a text sample every so many steps too, not only after each epoch; 0 is off."""
    sample_prompt: str = ""
    """How sampled texts begin; empty begins a new story."""
    sample_tokens: Annotated[int, Field(ge=0, le=100_000)] = 100
    """Length of a sample, in tokens; 0 writes none."""
    story_losses: Literal["none", "test", "all"] = "none"
    """Keep the loss of each story in result.json: of the test split, or of valid too; for intervals paired by story."""
    tensorboard: bool = False
    """Log to runs/NAME/tensorboard as well (needs the tensorboard package)."""
    wandb: bool = False
    """Log to Weights & Biases as well (needs the wandb package; WANDB_MODE=offline keeps it in runs/NAME/wandb)."""
    trackio: bool = False
    """Log to trackio as well, which keeps it on this machine (needs the trackio package)."""

    def find_problems(self) -> Iterator[str]:
        if self.top_k_warmup + self.top_k_ramp > 1:
            both = f"top_k_warmup {self.top_k_warmup} and top_k_ramp {self.top_k_ramp}"
            yield f"{both} together exceed the whole run; lower them to a sum of at most 1"
