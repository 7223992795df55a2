"""Guilds on the page: what the experts of a group are said to share, the evidence, and what chance would give.

Shows RUN/analysis/guilds.json as it fits its form. Any part of it may be absent; the page leaves it out, or says so.
"""

from collections.abc import Sequence
from statistics import mean

from some_moe.glass import name_text
from some_moe.glass.page.blocks import Block, Card, Cards, Fold, Notice, Record, Section, Table, Text
from some_moe.layout import ABSENT, Column, format_number, number_column, text_column

SHOWN_SUPPORTED, SHOWN_OTHERS = 12, 4
SHOWN_WORDS, SHOWN_EXCERPTS = 10, 4
SUPPORTED = "supported"
NO_TWIN = (
    "No twin run with keys that never move was given as a control. The random keys above stand in for it within this "
    "model; `some analyze RUN --control TWIN` compares with a trained one."
)
HOW_TO_READ = (
    "In each card the control is the same queries with random keys (for the bits), or the same model without other "
    "experts that displace its words as much (for the changes of the loss, in nats per token). The last line is the "
    "harm beyond displacement: what its words lose, less what losing as much with other experts costs them; the same "
    "of other words is taken off."
)


def make_guild_section(found: Record | None) -> Section:
    """The section; a sentence where no guilds were looked for."""
    if found is None:
        return Section("Guilds", [Notice("Guilds were not looked for; `some analyze RUN` does it.")])
    blocks: list[Block] = [Notice(found["stale"])] if found.get("stale") else []
    blocks += [Text(_introduce(found)), *_count_survivors(found), *_show_guilds(found.get("guilds") or [])]
    if found.get("families"):
        blocks.append(_family_table(found))
    if (found.get("depth") or {}).get("statement"):
        blocks.append(Text(found["depth"]["statement"]))
    if found.get("communities"):
        caption = "Experts that are chosen together: communities of the graph of co-selections."
        blocks.append(Table.of(COMMUNITY_COLUMNS, found["communities"], caption))
    if found.get("swap"):
        blocks.append(_swap_table(found))
    if found.get("control") is None:
        blocks.append(Notice(NO_TWIN))
    if found.get("notes"):
        blocks.append(Fold("How these figures are made", [Text(note) for note in found["notes"]]))
    return Section("Guilds", blocks)


def _introduce(found: Record) -> str:
    split = name_text(found.get("split"))
    where = f"{found['num_tokens']:,} tokens of {split}" if found.get("num_tokens") else split
    labels = f" {found['labels']}" if found.get("labels") else ""
    level = found.get("level")
    kept = f" The chance that this page calls any false guild supported is kept below {level:.0%}." if level else ""
    return (
        f"A guild is a group of experts that serves one kind of word. Each candidate was tested on {where}: is the tie "
        "stronger than shuffled labels give, is it stronger than with random keys, and is that kind of word hurt most "
        f"when the group is taken away?{kept}{labels}"
    )


def _count_survivors(found: Record) -> list[Block]:
    """How many candidates passed each test, here and in the control run."""
    control = found.get("control") or {}
    named = (("this run", found), (f"control: {control.get('run', '')}", control))
    rows = [one["passed"] | {"run": name} for name, one in named if one.get("passed")]
    return [Table.of(SURVIVOR_COLUMNS, rows, "Candidates that are left after each test.")] if rows else []


def _show_guilds(guilds: Sequence[Record]) -> list[Block]:
    """Cards for the supported ones and for the best tested of the others; a table of the rest."""
    supported = [guild for guild in guilds if guild["verdict"] == SUPPORTED]
    others = [guild for guild in guilds if guild["verdict"] != SUPPORTED]
    # Those that came far are the instructive ones: knocked out, then strongest tie.
    others.sort(key=lambda guild: (guild.get("knockout") is None, -(guild.get("npmi") or 0)))
    if not guilds:
        return [Notice("No group of experts is tied to a kind of word beyond chance: there is no candidate.")]
    blocks: list[Block] = []
    if not supported:
        failed = "No candidate passed all tests. The cards show the ones that came furthest, and why they failed."
        blocks.append(Notice(failed))
    shown = [*supported[:SHOWN_SUPPORTED], *others[:SHOWN_OTHERS]]
    blocks += [Text(HOW_TO_READ), Cards([_make_card(guild) for guild in shown])]
    rest = [*supported[SHOWN_SUPPORTED:], *others[SHOWN_OTHERS:]]
    return [*blocks, Fold(f"{len(rest)} more candidates", [Table.of(GUILD_COLUMNS, rest)])] if rest else blocks


# --- cards --------------------------------------------------------------------------------------------------


def _make_card(guild: Record) -> Card:
    words, contexts = guild.get("words") or [], guild.get("contexts") or []
    return Card(
        title=guild["class"],
        verdict=guild["verdict"],
        tone="good" if guild["verdict"] == SUPPORTED else "bad",
        subtitle=f"{guild['family']}, layer {guild['layer']}",
        experts=guild["experts"],
        reason=guild["reason"],
        evidence=_evidence_table(guild),
        words=[(word["text"], word["count"]) for word in words[:SHOWN_WORDS]],
        excerpts=[(one["before"], one["word"], one["after"]) for one in contexts[:SHOWN_EXCERPTS]],
    )


def _evidence_table(guild: Record) -> Table:
    """Every test that was made, with what the control gave: random keys, or equally used random experts."""
    keys, knockout = guild.get("random_keys") or {}, guild.get("knockout") or {}
    by_chance = mean(keys["random_bits"]) if keys.get("random_bits") else None

    def changed(name: str) -> str:
        return format_number(knockout.get(name), "+.4f")

    rows = [
        ["Experts stand out (NPMI; q)", format_number(guild.get("npmi"), ".2f"), "", show_p(guild.get("q_value"))],
        ["Beyond shuffled labels", "", "", show_p(guild.get("p_association"))],
        ["Bits about its words", format_number(keys.get("own_bits"), ".4f"), format_number(by_chance, ".4f"),
         show_p(keys.get("p_adjusted"))],
        ["Taken away: its words", changed("class_change"), changed("random_class_change"), ""],
        ["Taken away: others", changed("other_change"), changed("random_other_change"), ""],
        ["Harm beyond displacement", changed("effect"), "", show_p(knockout.get("p_adjusted"))],
    ]  # fmt: skip
    columns = [Column("Test"), *(Column(header, numeric=True) for header in ("Group", "Control", "p"))]
    return Table(columns, [row for row in rows if set(row[1:]) - {"", ABSENT}])


# --- tables -------------------------------------------------------------------------------------------------


def show_p(value: float | None) -> str:
    """A p- or q-value; a very small one as a bound."""
    return "< 0.001" if value is not None and value < 0.001 else format_number(value, ".3f")


def _several(header: str, name: str) -> Column:
    """The mean of several draws, and the highest of them."""

    def show(record: Record) -> str:
        values = record.get(name) or []
        if len(values) < 2:
            return format_number(values[0] if values else None, ".3f")
        return f"{mean(values):.3f}, highest {max(values):.3f}"

    return Column(header, show, numeric=True)


def show_interval(bounds: Sequence[float] | None, form: str) -> str:
    return f"{bounds[0]:{form}} to {bounds[1]:{form}}" if bounds else ABSENT


def _interval(found: Record, form: str) -> Column:
    confidence = f"{1 - found['level']:.0%}" if found.get("level") else "The"
    return Column(f"{confidence} interval", lambda record: show_interval(record.get("interval"), form), numeric=True)


P_VALUE = Column("p", lambda record: show_p(record.get("p_value")), numeric=True)
CORRECTED = Column("Corrected p", lambda record: show_p(record.get("p_adjusted")), numeric=True)
SURVIVOR_COLUMNS = [
    text_column("Run", "run"),
    number_column("Candidates", "enrichment"),
    number_column("beyond shuffled labels", "association"),
    number_column("beyond random keys", "random_keys"),
    number_column("and hurt when taken away", "knockout"),
]
GUILD_COLUMNS = [
    text_column("Kind of word", "class"),
    text_column("Family", "family"),
    number_column("Layer", "layer"),
    Column("Experts", lambda guild: ", ".join(map(str, guild["experts"])), wraps=True),
    number_column("NPMI", "npmi", ".2f"),
    text_column("Verdict", "verdict"),
    text_column("Reason", "reason", wraps=True),
]
COMMUNITY_COLUMNS = [
    number_column("Layer", "layer"),
    number_column("Modularity", "modularity", ".3f"),
    number_column("Chance", "null_mean", ".3f"),
    number_column("± sd", "null_sd", ".3f"),
    P_VALUE,
    _several("Random keys", "random_keys_modularity"),
    Column(
        "Groups of experts",
        lambda layer: " · ".join(", ".join(map(str, group)) for group in layer.get("groups") or []),
        wraps=True,
    ),
]


def _family_table(found: Record) -> Table:
    """How much experts tell about each family of classes, layer by layer, beside chance, random keys, the control."""
    twins = {(layer["family"], layer.get("layer")): layer.get("nmi") for layer in _list_layers(found.get("control"))}
    layers = [one | {"twin": twins.get((one["family"], one.get("layer")))} for one in _list_layers(found)]
    columns = [
        text_column("Kind of class", "family"),
        number_column("Layer", "layer"),
        number_column("NMI", "nmi", ".3f"),
        _interval(found, ".3f"),
        number_column("Bits", "mi_bits", ".3f"),
        number_column("Chance, bits", "null_mean_bits", ".3f"),
        CORRECTED,
        _several("NMI, random keys", "random_keys_nmi"),
        number_column("NMI, control run", "twin", ".3f"),
    ]
    caption = "What the chosen experts tell about a token's class. NMI: the share of the class's entropy that is told, "
    caption += "less what shuffled labels tell. p is corrected for all layers and kinds of class."
    return Table.of(columns, layers, caption)


def _list_layers(found: Record | None) -> list[Record]:
    """Every layer of every family, with the family's name."""
    families = (found or {}).get("families") or []
    return [layer | {"family": one.get("family", "?")} for one in families for layer in one.get("layers") or []]


def _swap_table(found: Record) -> Table:
    change = number_column("Change of the loss, nats", "loss_change", "+.4f")
    caption = "What it costs when the experts of a layer change places under the same keys. Near zero: who sits where "
    columns = [number_column("Layer", "layer"), change, _interval(found, ".4f")]
    return Table.of(columns, found["swap"], caption + "does not matter.")
