"""The ten runs V1 to V10 of the v3 ablation report."""

from typing import Any

from some_moe.config import RunConfig
from some_moe.lab.registry.protocol import DECAY_ASSUMED, LINEAR_NOTE, PADDED, PADDING_NOTE, record_run
from some_moe.lab.registry.records import Experiment, Published, Source, figure, read_epochs

V3_REPORT = Source("v3 ablation runs", ("v3/some-v3-ablation-runs-v1.pdf",))

# V2's shape; the other runs say what they change.
V = RunConfig().override(
    PADDED
    | {
        "model.d_model": 384,
        "model.num_layers": 6,
        "model.num_heads": 6,
        "model.vocab_size": 8192,
        "model.num_experts": 64,
        "model.d_ffn": 1024,
        "model.top_k": 4,
        "model.query": "linear",
        "gravity.alpha": 0.01,
        "gravity.beta": 0.001,
        "gravity.delta": 0.001,
        "gravity.theta_percentile": 0.05,
        "gravity.ema_decay": 0.99,
        "data.seq_len": 256,
        "data.batch_size": 128,
        "data.train_subset_size": 20000,
        "data.val_subset_size": 4000,
        "train.learning_rate": 8e-4,
        "train.epochs": 4,
    }
)

ASSUMED = (
    *DECAY_ASSUMED,
    "model.query",
    "model.temperature",
    "gravity.alpha",
    "gravity.beta",
    "gravity.delta",
    "gravity.theta_percentile",
    "gravity.ema_decay",
    "data.val_subset_size",
    "train.weight_decay",
)

V_NOTES = (
    PADDING_NOTE,
    LINEAR_NOTE,
    "The rules of gravity are not stated. Each value is the one that the neighbouring reports favour: alpha "
    "0.01 (MVP, v4), beta 0.001 (MVP, v2) as a pull (v4), delta 0.001 (all), theta_percentile 0.05 (v2, v4), "
    "ema_decay 0.99 (v4).",
)
INIT_NOTE = "V8, V9 and V10 differ by 0.012 nats, with one random seed each: no ranking follows."
LENGTH_NOTE = (
    "V2 and V8 are one model at seq_len 256 and 512; divided by the share of text in their rows, both losses "
    "are about 3.1: the gain from the longer context is dilution by padding."
)


def record_v(
    name: str, title: str, changes: dict[str, Any], *, parameters: str, steps: int, epochs: str,
    also_printed: tuple[str, ...] = (), findings: tuple[str, ...] = (), notes: tuple[str, ...] = (),
    assumed: tuple[str, ...] = (),
) -> Experiment:  # fmt: skip
    """Record one run; `parameters` is "total M, trainable M, trainable percent" as printed."""
    total, trainable, percent = map(figure, parameters.split())
    rows = read_epochs(epochs)
    published = Published(
        train_loss=rows[-1].train_loss,
        val_loss=rows[-1].val_loss,
        perplexity=rows[-1].perplexity,
        gini=rows[-1].gini,
        entropy_bits=rows[-1].entropy_bits,
        total_parameters_millions=total,
        trainable_parameters_millions=trainable,
        trainable_percent=percent,
        steps=steps,
        epochs=rows,
        also_printed=also_printed,
        findings=findings,
    )
    return record_run(
        name, base=V, changes=changes, assumed=ASSUMED + assumed, series="V (v3)", title=title,
        source=V3_REPORT, published=published, notes=notes + V_NOTES,
    )  # fmt: skip


LONG = {"data.seq_len": 512}

V_RUNS = (
    record_v(
        "V1",
        "sanity check",
        {"model.d_model": 256, "model.num_heads": 4, "model.num_layers": 4,
         "model.num_experts": 32, "model.top_k": 2},
        parameters="72.80 5.52 7.6",
        steps=624,
        epochs="""
            1 3.6590 2.8422 17.15 0.631 3.887
            4 2.5631 2.5555 12.88 0.550 4.192
        """,
    ),
    record_v(
        "V2",
        "medium baseline",
        {},
        parameters="313.27 10.74 3.4",
        steps=624,
        epochs="""
            1 3.3316 2.6379 13.98 0.518 5.315
            4 2.2398 2.2681  9.66 0.524 5.309
        """,
        notes=(LENGTH_NOTE,),
    ),
    record_v(
        "V3",
        "capacity scaling: 256 wider experts",
        {"model.d_model": 512, "model.num_heads": 8, "model.num_layers": 8,
         "model.num_experts": 256, "model.d_ffn": 1536, "model.top_k": 8},
        parameters="3244.34 18.92 0.58",
        steps=624,
        epochs="""
            1 3.1599 2.4792 11.93 0.590 6.994
            4 1.9782 2.0542  7.80 0.539 7.134
        """,
    ),
    record_v(
        "V4",
        "vocabulary scaling: 16,384",
        {"model.vocab_size": 16384},
        parameters="319.57 17.04 5.3",
        steps=624,
        epochs="""
            1 3.3803 2.6266 13.83 0.466 5.441
            4 2.2190 2.2484  9.47 0.479 5.410
        """,
        notes=("Its loss is per token of a larger vocabulary: it does not compare with V2's without "
               "the bytes per token.",),
    ),
    record_v(
        "V5",
        "diversity scaling: 16 of 256 experts",
        {"model.num_experts": 256, "model.d_ffn": 1536, "model.top_k": 16},
        parameters="1825.63 10.74 0.59",
        steps=624,
        epochs="""
            1 3.3514 2.6459 14.10 0.402 7.534
            4 2.2248 2.2565  9.55 0.379 7.569
        """,
        notes=("The report lists a vocabulary of 16,384, but 10.74 M trainable parameters are those of 8,192 "
               "(16,384 would be 17.04 M): registered with 8,192.",
               "Its fall in gini, 0.023, is called steep; V1's, 0.081, only consistent."),
    ),
    record_v(
        "V6",
        "depth against width: 10 layers of 512",
        {"model.d_model": 512, "model.num_heads": 8, "model.num_layers": 10, "model.top_k": 8},
        parameters="693.62 21.55 3.1",
        steps=624,
        epochs="""
            1 3.3282 2.5286 12.54 0.399 5.592
            4 1.9726 2.0471  7.75 0.383 5.635
        """,
        findings=("Depth is held to make the routing more capable of finding and combining experts.",),
    ),
    record_v(
        "V7",
        "batch against sequence: 64 × 512",
        {**LONG, "data.batch_size": 64},
        parameters="313.27 10.74 3.4",
        steps=1248,
        epochs="""
            1 1.7605 1.3095 3.70 - -
            4 1.1467 1.1134 3.04 0.661 4.454
        """,
        also_printed=("Gini peaked at 0.676 before it fell to 0.661.",
                      "Entropy bottomed at 4.417 bits before it rose to 4.454."),
        findings=("A long context is held to matter most.",
                  "Small batches, and so more and smaller moves of the keys, are held to be best."),
        notes=("Against V8 it also takes twice the steps, so batch size and training length are confounded.",
               LENGTH_NOTE),
    ),
    record_v(
        "V8",
        "batch against sequence: 128 × 512",
        LONG,
        parameters="313.27 10.74 3.4",
        steps=624,
        epochs="""
            1 2.0406 1.4250 4.16 0.729 4.293
            4 1.2727 1.2117 3.36 0.693 4.377
        """,
        findings=("A larger batch is usually better for gradients, but the keys move once a step and by a "
                  "rule, so here more steps are held to count for more.",),
        notes=(LENGTH_NOTE, INIT_NOTE),
    ),
    record_v(
        "V9",
        "orthogonal experts",
        {**LONG, "model.init_method": "orthogonal"},
        parameters="313.27 10.74 3.4",
        steps=624,
        epochs="""
            1 2.0241 1.4228 4.15 0.764 4.154
            4 1.2778 1.2173 3.38 0.744 4.245
        """,
        findings=("Slightly worse than the default initialisation.",
                  "Orthogonal experts are held to be a poor library, so that routing leans on few.",
                  "Unstructured random experts are held to be the richer library."),
        notes=("Unstructured experts are called best here, sparse ones at V10, in one report.", INIT_NOTE),
    ),
    record_v(
        "V10",
        "sparse experts",
        {**LONG, "model.init_method": "sparse"},
        parameters="313.27 10.74 3.4",
        steps=624,
        epochs="""
            1 1.9960 1.4150 4.12 0.709 4.344
            4 1.2650 1.2054 3.34 0.710 4.341
        """,
        findings=("The best of the three initialisations.",
                  "Distinct, specialised experts are held to be ideal: routing leans on those that fit."),
        notes=("Unstructured experts are called best at V9, and sparse ones here, in one report.", INIT_NOTE),
        assumed=("model.sparsity",),
    ),
)  # fmt: skip
