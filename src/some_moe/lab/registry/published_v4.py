"""The runs A1 to A6 and B1 to B3 of the v4 ablation series."""

from typing import Any

from some_moe.config import RunConfig
from some_moe.lab.registry.protocol import DECAY_ASSUMED, PADDED, PADDING_NOTE, record_run
from some_moe.lab.registry.records import Experiment, Published, Source, Trace, figure, read_epochs

SERIES_A_FILE = "v4/some-v4-ablation-series-a-results.pdf"
SERIES_B_FILE = "v4/some-v4-ablation-series-b-results.pdf"
SERIES_C_FILE = "v4/some-v4-ablation-series-c-results.pdf"
SERIES_A = Source("v4 ablation series A", (SERIES_A_FILE,))
SERIES_A_AND_B = Source("v4 ablation series A; printed again in series B", (SERIES_A_FILE, SERIES_B_FILE))
SERIES_B = Source("v4 ablation series B", (SERIES_B_FILE,))
SERIES_B_AND_C = Source("v4 ablation series B; the index lists it under series C", (SERIES_B_FILE, SERIES_C_FILE))

# A1's shape; the other runs say what they change.
V4 = RunConfig().override(
    PADDED
    | {
        "model.d_model": 384,
        "model.num_layers": 8,
        "model.num_heads": 8,
        "model.vocab_size": 8192,
        "model.num_experts": 64,
        "model.d_ffn": 1024,
        "model.top_k": 4,
        "model.query": "mlp",
        "model.init_method": "default",
        "model.temperature": 0.8,
        "gravity.alpha": 0.01,
        "gravity.beta": 0.005,
        "gravity.delta": 0.001,
        "gravity.theta_percentile": 0.05,
        "gravity.ema_decay": 0.99,
        "data.seq_len": 768,
        "data.batch_size": 32,
        "data.train_subset_size": 10000,
        "data.val_subset_size": 2000,
        "train.learning_rate": 6e-4,
        "train.epochs": 4,
    }
)

ASSUMED = (*DECAY_ASSUMED, "gravity.every", "data.source", "train.weight_decay")

V4_NOTES = (
    PADDING_NOTE,
    "TRAINING_TEMP 0.8 is read as what divides the scores before the softmax over the chosen experts.",
)
ONE_SEED_NOTE = "B1 is 0.048 worse than A4 and 0.043 worse than B2, for no stated reason, with one random seed each."
HIGH_GINI_NOTE = (
    "A gini of 0.92 is called collapse at A6, while B2 and B3 reach 0.95 and 0.97 with good losses; but the highest "
    "possible ones differ: 4 experts of 64 give 0.94, of 256 0.98, of 512 0.99."
)
HEADS_NOTE = "The heads change with the depth ({heads} instead of 8), so the two are confounded."


def record_v4(
    name: str, title: str, changes: dict[str, Any], *, parameters: str, epochs: str, usage: str,
    source: Source, traces: tuple[Trace, ...] = (), also_printed: tuple[str, ...] = (),
    findings: tuple[str, ...] = (), notes: tuple[str, ...] = (), derived_from: str | None = None,
) -> Experiment:  # fmt: skip
    """Record one run.

    `parameters` is "total M, trainable M, trainable percent", and `usage` the final analysis: "layer, experts
    used, experts, percent used, gini, entropy, greatest entropy", both as printed.
    """
    total, trainable, percent = map(figure, parameters.split())
    layer, used, experts, percent_used, gini, entropy, max_entropy = usage.split()
    rows = read_epochs(epochs)
    published = Published(
        train_loss=rows[-1].train_loss,
        val_loss=rows[-1].val_loss,
        perplexity=rows[-1].perplexity,
        gini=figure(gini),
        entropy_bits=figure(entropy),
        max_entropy_bits=figure(max_entropy),
        experts_used=int(used),
        num_experts=int(experts),
        middle_layer=int(layer),
        total_parameters_millions=total,
        trainable_parameters_millions=trainable,
        trainable_percent=percent,
        steps=1248,
        epochs=rows,
        traces=traces,
        also_printed=(f"Experts used: {percent_used} %.", *also_printed),
        findings=findings,
    )
    return record_run(
        name, base=V4, changes=changes, assumed=ASSUMED, series=f"{name[0]} (v4)", title=title,
        source=source, published=published, notes=notes + V4_NOTES, derived_from=derived_from,
    )  # fmt: skip


NOUN_GUILD = (55, 20, 23, 1)
STORYTELLER = (58, 50, 6, 26)
A1_TRACES = (
    Trace("lived", 4, NOUN_GUILD),
    Trace("a", 4, (1, 23, 20, 55)),
    Trace("He", 4, NOUN_GUILD),
    Trace("play", 4, NOUN_GUILD),
    Trace("friends", 4, NOUN_GUILD),
    Trace("lived", 1, (39, 43, 30, 42)),
    Trace("lived", 7, STORYTELLER),
    *(Trace(token, 7, STORYTELLER) for token in ("in", "a", "was", "and", "to", "his", "day")),
)

A_RUNS = (
    record_v4(
        "A1",
        "the v4 baseline",
        {},
        parameters="419.14 15.77 3.76",
        epochs="""
            1 1.2636 0.8872 2.43 0.841 3.537
            2 0.9201 0.8054 2.24 0.791 4.096
            3 0.8417 0.7700 2.16 0.807 3.890
            4 0.8061 0.7629 2.14 0.791 4.085
        """,
        usage="4 64 64 100.00 0.7912 4.0851 6.0000",
        source=SERIES_A,
        traces=A1_TRACES,
        also_printed=("Noun guild, layer 4: experts 55, 20, 23, 1.",
                      "Utility guild, layer 7: experts 58, 50, 6, 26, for many words."),
        findings=("A strong starting point.",
                  "One group of experts in layer 4 is read as a guild for nouns, pronouns and core concepts, "
                  "and as evidence that the peer pull works.",
                  "The groups of layers 1, 4 and 7 are read as word forms, meaning and narrative flow, "
                  "a hierarchy of abstraction.",
                  "The index calls its use of experts balanced, with improving entropy."),
        notes=("At 26 % text in rows of 768 the published 0.763 would be about 2.94 nats over real tokens, "
               "perplexity 19, if predicting padding after padding costs nothing.",
               "The noun guild fires on lived, a and play too.",
               "Use is called balanced at a gini of 0.791, and entropy falls between epochs 2 and 4."),
    ),
    record_v4(
        "A2",
        "wider: 512",
        {"model.d_model": 512},
        parameters="562.88 25.22 4.48",
        epochs="""
            1 1.2302 0.8692 2.38 0.829 3.878
            2 0.8874 0.7719 2.16 0.792 4.134
            3 0.7959 0.7328 2.08 0.842 3.709
            4 0.7536 0.7259 2.07 0.822 3.913
        """,
        usage="4 64 64 100.00 0.8222 3.9128 6.0000",
        source=SERIES_A,
        findings=("Width helps.",),
        derived_from="A1",
    ),
    record_v4(
        "A3",
        "deeper: 10 layers",
        {"model.num_layers": 10},
        parameters="522.36 18.14 3.47",
        epochs="""
            1 1.3439 0.9023 2.47 0.870 3.370
            2 0.9258 0.8025 2.23 0.870 3.376
            3 0.8381 0.7639 2.15 0.865 3.409
            4 0.7997 0.7569 2.13 0.862 3.429
        """,
        usage="5 64 64 100.00 0.8620 3.4290 6.0000",
        source=SERIES_A,
        findings=("Depth helps.",),
        derived_from="A1",
    ),
    record_v4(
        "A4",
        "wider and deeper",
        {"model.d_model": 512, "model.num_layers": 10},
        parameters="701.50 29.42 4.19",
        epochs="""
            1 1.2452 0.8527 2.35 0.872 3.396
            2 0.8723 0.7586 2.14 0.842 3.658
            3 0.7790 0.7197 2.05 0.864 3.336
            4 0.7330 0.7126 2.04 0.851 3.413
        """,
        usage="5 64 64 100.00 0.8510 3.4132 6.0000",
        source=SERIES_A_AND_B,
        findings=("The best of the series: width and depth together.",
                  "The index says that depth made routing more concentrated."),
        notes=("It is wider than A1 as well as deeper; the deeper A5 has a lower gini, 0.829.",),
        derived_from="A1",
    ),
    record_v4(
        "A5",
        "12 layers, 12 heads",
        {"model.num_layers": 12, "model.num_heads": 12},
        parameters="625.57 20.51 3.28",
        epochs="""
            1 1.3303 0.8973 2.45 0.839 3.678
            2 0.9184 0.7966 2.22 0.815 3.782
            3 0.8267 0.7537 2.12 0.836 3.573
            4 0.7849 0.7460 2.11 - -
        """,
        usage="6 64 64 100.00 0.8286 3.7079 6.0000",
        source=SERIES_A,
        findings=("Barely better than A3: diminishing returns of depth.",),
        notes=(HEADS_NOTE.format(heads=12),
               "A3 to A5 gains more (0.011) than A1 to A3 (0.006), though it is called diminishing.",
               "Gini and entropy of epoch 4 are not printed; the final analysis has them."),
        derived_from="A1",
    ),
    record_v4(
        "A6",
        "16 layers, 16 heads: the collapse",
        {"model.d_model": 512, "model.num_layers": 16, "model.num_heads": 16},
        parameters="1117.36 42.04 3.76",
        epochs="""
            1 1.7008 1.4363 4.21 0.904 2.848
            2 1.9732 1.9730 7.19 0.913 2.707
            3 2.1349 1.9679 7.16 0.919 2.608
            4 2.1309 1.9682 7.16 - -
        """,
        usage="8 64 64 100.00 0.9038 2.8484 6.0000",
        source=SERIES_A,
        also_printed=("Gini 0.922 and entropy 2.536 bits in the text.",),
        findings=("Collapse at great depth, taken for a property of the learning rule and not for a fault.",
                  "Supposed cause: the rules are local, and in late layers the queries are too abstract "
                  "for the routing to stay stable."),
        notes=(HEADS_NOTE.format(heads=16),
               "Gini 0.9038 and entropy 2.8484 of the final analysis are those of the first epoch, the best "
               "checkpoint; 0.922 and 2.536 in the text fit the fourth, which is not printed.",
               "A training loss of 2.13 is about that of a constant predictor on padded rows: the whole model "
               "died, and the routing perhaps only with it.",
               HIGH_GINI_NOTE),
        derived_from="A4",
    ),
)  # fmt: skip

WIDE = {"model.d_model": 512, "model.num_layers": 10}

B_RUNS = (
    record_v4(
        "B1",
        "A4 with 128 experts",
        {**WIDE, "model.num_experts": 128},
        parameters="1373.57 29.42 2.14",
        epochs="""
            1 1.5803 0.9990 2.72 0.941 3.272
            2 0.9866 0.8270 2.29 0.923 3.413
            3 0.8587 0.7709 2.16 0.912 3.635
            4 0.8064 0.7602 2.14 0.914 -
        """,
        usage="5 128 128 100.00 0.9143 3.4272 7.0000",
        source=SERIES_B_AND_C,
        findings=("The index says that doubling the experts raised gini, lowered entropy a little, "
                  "and strained the routing.",),
        notes=("Entropy rose against A4, 3.413 to 3.427, where the index says it fell.", ONE_SEED_NOTE,
               "Entropy of epoch 4 is not printed; the final analysis has it.",
               "The index counts it as series C, while its own report is series B."),
        derived_from="A4",
    ),
    record_v4(
        "B2",
        "A4 with 256 experts",
        {**WIDE, "model.num_experts": 256},
        parameters="2717.71 29.42 1.08",
        epochs="""
            1 1.2668 0.8658 2.38 0.948 4.094
            2 0.8823 0.7663 2.15 0.959 3.513
            3 0.7888 0.7254 2.07 0.956 3.719
            4 0.7422 0.7174 2.05 0.952 3.725
        """,
        usage="5 256 256 100.00 0.9516 3.7252 8.0000",
        source=SERIES_B,
        notes=(ONE_SEED_NOTE, HIGH_GINI_NOTE),
        derived_from="A4",
    ),
    record_v4(
        "B3",
        "A4 with 512 experts",
        {**WIDE, "model.num_experts": 512},
        parameters="5406.00 29.42 0.54",
        epochs="""
            1 1.2734 0.8652 2.38 0.979 3.565
            2 0.8824 0.7638 2.15 0.972 3.744
            3 0.7859 0.7231 2.06 0.971 3.841
            4 0.7388 0.7155 2.05 0.972 3.767
        """,
        usage="5 497 512 97.07 0.9719 3.7674 9.0000",
        source=SERIES_B,
        notes=("The only run of the series that leaves experts unused: 15 of 512.", HIGH_GINI_NOTE),
        derived_from="A4",
    ),
)  # fmt: skip
