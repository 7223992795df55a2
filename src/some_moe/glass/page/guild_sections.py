"""Guilds on the page: what the experts of a group are said to share, the evidence, and what chance would give.

Reads RUN/analysis/guilds.json. Any part of it may be absent; the page then leaves that part out or says so.
"""

from collections.abc import Sequence
from statistics import mean

from some_moe.glass.page.blocks import Block, Card, Cards, Fold, Notice, Section, Table, Text
from some_moe.glass.page.tables import Record, Show, figure, interval, make_table, number, signed, word
from some_moe.layout import Column

SHOWN_SUPPORTED, SHOWN_OTHERS = 12, 4
SHOWN_WORDS, SHOWN_EXCERPTS = 10, 4
SUPPORTED = "supported"

HOW_TO_READ = (
    "In each card the control is the same model with random keys (for the bits), or without other experts that are "
    "used as much (for the changes of the loss, in nats per token)."
)


def make_guild_section(found: Record | None) -> Section:
    """The section; a sentence where no guilds were looked for."""
    if found is None:
        return Section("Guilds", [Notice("Guilds were not looked for; `some analyze RUN` does it.")])
    guilds: list[Record] = found.get("guilds") or []
    blocks: list[Block] = [Notice(found["stale"])] if found.get("stale") else []
    blocks += [Text(_introduce(found)), *_count_survivors(found), *_show_guilds(guilds)]
    if found.get("families"):
        blocks.append(_family_table(found))
    if (found.get("depth") or {}).get("statement"):
        blocks.append(Text(found["depth"]["statement"]))
    if found.get("communities"):
        blocks.append(_community_table(found["communities"]))
    if found.get("swap"):
        blocks.append(_swap_table(found["swap"], found))
    if found.get("control") is None:
        blocks.append(
            Notice(
                "No twin run with keys that never move was given as a control. The random keys above stand in for it "
                "within this model; `some analyze RUN --control TWIN` compares with a trained one."
            )
        )
    if found.get("notes"):
        blocks.append(Fold("How these figures are made", [Text(note) for note in found["notes"]]))
    return Section("Guilds", blocks)


def _introduce(found: Record) -> str:
    where = f"{found['num_tokens']:,} tokens of the {found['split']} split" if found.get("num_tokens") else "one split"
    level = f" The chance that this page calls any false guild supported is kept below {found['level']:.0%}." if (
        found.get("level")
    ) else ""  # fmt: skip
    return (
        f"A guild is a group of experts that serves one kind of word. Each candidate was tested on {where}: is the tie "
        "stronger than shuffled labels give, is it stronger than with random keys, and is that kind of word hurt most "
        f"when the group is taken away?{level}"
    )


def _count_survivors(found: Record) -> list[Block]:
    """How many candidates passed each test, here and in the control run."""
    headers = ("Candidates", "beyond shuffled labels", "beyond random keys", "and hurt when taken away")
    columns = [Column("Run"), *(Column(header, numeric=True) for header in headers)]
    rows = []
    control = found.get("control") or {}
    for name, record in (("this run", found), (f"control: {control.get('run', '')}", control)):
        passed = record.get("passed")
        if passed:
            tests = ("enrichment", "association", "random_keys", "knockout")
            rows.append([name, *(str(passed.get(test, "–")) for test in tests)])
    return [Table(columns, rows, "Candidates that are left after each test.")] if rows else []


def _show_guilds(guilds: Sequence[Record]) -> list[Block]:
    """Cards for the supported ones and for the best tested of the others; a table of the rest."""
    supported = [guild for guild in guilds if guild.get("verdict") == SUPPORTED]
    others = [guild for guild in guilds if guild.get("verdict") != SUPPORTED]
    # Those that came far are the instructive ones: knocked out, then strongest tie.
    others.sort(key=lambda guild: (guild.get("knockout") is None, -(guild.get("npmi") or 0)))
    blocks: list[Block] = []
    if not guilds:
        blocks.append(Notice("No group of experts is tied to a kind of word beyond chance: there is no candidate."))
    elif not supported:
        blocks.append(
            Notice("No candidate passed all tests. The cards show the ones that came furthest, and why they failed.")
        )
    shown = [*supported[:SHOWN_SUPPORTED], *others[:SHOWN_OTHERS]]
    if shown:
        blocks.append(Text(HOW_TO_READ))
        blocks.append(Cards([_make_card(guild) for guild in shown]))
    rest = [*supported[SHOWN_SUPPORTED:], *others[SHOWN_OTHERS:]]
    if rest:
        blocks.append(Fold(f"{len(rest)} more candidates", [_rest_table(rest)]))
    return blocks


# --- cards --------------------------------------------------------------------------------------------------


def _make_card(guild: Record) -> Card:
    verdict = str(guild.get("verdict") or "not judged")
    return Card(
        title=str(guild.get("class") or guild.get("name") or "Unnamed"),
        verdict=verdict,
        tone={SUPPORTED: "good", "not judged": "open"}.get(verdict, "bad"),
        subtitle=f"{guild.get('family', 'unknown family')}, layer {guild.get('layer', '?')}",
        experts=guild.get("experts") or [],
        reason=str(guild.get("reason") or ""),
        evidence=_evidence_table(guild),
        words=[(str(word["text"]), int(word["count"])) for word in (guild.get("words") or [])[:SHOWN_WORDS]],
        excerpts=[
            (str(c["before"]), str(c["word"]), str(c["after"])) for c in (guild.get("contexts") or [])[:SHOWN_EXCERPTS]
        ],
    )


def _evidence_table(guild: Record) -> Table:
    """Every test that was made, with what the control gave: random keys, or equally used random experts."""
    keys, knockout = guild.get("random_keys") or {}, guild.get("knockout") or {}
    by_chance = keys.get("random_bits")
    p_knockout = knockout.get("p_adjusted", knockout.get("p_value"))
    rows = [
        ["Experts stand out (NPMI; q)", number(guild.get("npmi"), 2), "", show_p(guild.get("q_value"))],
        ["Beyond shuffled labels", "", "", show_p(guild.get("p_association"))],
        ["Bits about its words", number(keys.get("own_bits"), 4), number(mean(by_chance) if by_chance else None, 4),
         show_p(keys.get("p_adjusted"))],
        ["Taken away: its words", signed(knockout.get("class_change")),
         signed(knockout.get("random_class_change")), ""],
        ["Taken away: others", signed(knockout.get("other_change")), signed(knockout.get("random_other_change")), ""],
        ["Its words suffer more", signed(knockout.get("effect")), "", show_p(p_knockout)],
    ]  # fmt: skip
    columns = [Column("Test"), *(Column(header, numeric=True) for header in ("Group", "Control", "p"))]
    return Table(columns, [row for row in rows if any(cell not in ("", "–") for cell in row[1:])])


def _rest_table(guilds: Sequence[Record]) -> Table:
    columns: dict[str, Show] = {
        "Kind of word": word("class"),
        "Family": word("family"),
        "Layer": word("layer"),
        "Experts": lambda guild: ", ".join(map(str, guild.get("experts") or [])),
        "NPMI": figure("npmi", 2),
        "Verdict": word("verdict", "–"),
        "Reason": lambda guild: str(guild.get("reason") or ""),
    }
    return make_table(guilds, columns, words=("Kind of word", "Family", "Verdict"), wraps=("Experts", "Reason"))


# --- tables -------------------------------------------------------------------------------------------------


def _family_table(found: Record) -> Table:
    """How much experts tell about each family of classes, layer by layer, beside chance, random keys, the control."""
    twins = {(layer["family"], layer.get("layer")): layer.get("nmi") for layer in _list_layers(found.get("control"))}
    columns: dict[str, Show] = {
        "Kind of class": word("family"),
        "Layer": word("layer"),
        "NMI": figure("nmi", 3),
        f"{_confidence(found)} interval": lambda layer: interval(layer.get("interval"), 3),
        "Bits": figure("mi_bits", 3),
        "Chance, bits": figure("null_mean_bits", 3),
        "p": lambda layer: show_p(layer.get("p_value")),
        "NMI, random keys": lambda layer: _several(layer.get("random_keys_nmi"), 3),
    }
    if twins:
        columns["NMI, control run"] = lambda layer: number(twins.get((layer["family"], layer.get("layer"))), 3)
    caption = (
        "What the chosen experts tell about a token's class. NMI: the share of the class's entropy that is told, "
        "less what shuffled labels tell."
    )
    return make_table(_list_layers(found), columns, caption, words=("Kind of class",))


def _list_layers(found: Record | None) -> list[Record]:
    """Every layer of every family, with the family's name."""
    families = (found or {}).get("families") or []
    return [layer | {"family": one.get("family", "?")} for one in families for layer in one.get("layers") or []]


def _community_table(communities: Sequence[Record]) -> Table:
    columns: dict[str, Show] = {
        "Layer": word("layer"),
        "Modularity": figure("modularity", 3),
        "Chance": lambda layer: f"{number(layer.get('null_mean'), 3)} ± {number(layer.get('null_sd'), 3)}",
        "p": lambda layer: show_p(layer.get("p_value")),
        "Random keys": lambda layer: _several(layer.get("random_keys_modularity"), 3),
        "Groups of experts": lambda layer: " · ".join(", ".join(map(str, g)) for g in layer.get("groups") or []),
    }
    caption = "Experts that are chosen together: communities of the graph of co-selections."
    return make_table(communities, columns, caption, wraps=("Groups of experts",))


def _swap_table(swaps: Sequence[Record], found: Record) -> Table:
    columns: dict[str, Show] = {
        "Layer": word("layer"),
        "Change of the loss, nats": lambda swap: signed(swap.get("loss_change")),
        f"{_confidence(found)} interval": lambda swap: interval(swap.get("interval"), 4),
    }
    caption = "What it costs when the experts of a layer change places under the same keys. Near zero: who sits where "
    return make_table(swaps, columns, caption + "does not matter.")


# --- figures as text ----------------------------------------------------------------------------------------


def show_p(value: float | None) -> str:
    """A p- or q-value; a very small one as a bound."""
    if value is None:
        return "–"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _confidence(found: Record) -> str:
    return f"{1 - found['level']:.0%}" if found.get("level") else "The"


def _several(values: Sequence[float] | None, digits: int) -> str:
    """The mean of several draws, and the highest of them."""
    if not values or len(values) == 1:
        return number(values[0] if values else None, digits)
    return f"{number(mean(values), digits)}, highest {number(max(values), digits)}"
