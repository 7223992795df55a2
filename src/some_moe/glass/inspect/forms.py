"""What the files of an analysis may hold: they lie in a run's folder, and anybody may have written them."""

from pathlib import Path
from typing import Any

from some_moe.errors import ConfigError
from some_moe.system.files import inside
from some_moe.system.forms import Form, MisfitError, fields, fit, matches
from some_moe.system.reading import read_object

VERSION = 2  # of the analysis: one of another version is made anew
RENEW = "is left out; `some analyze RUN` makes it anew."
NAME = matches("[a-z][a-z0-9_]{0,60}")  # of a figure: it names a file, so that nothing in it may lead anywhere else

LAYER = fields(count="layer experts_used num_experts respawns?", counts="generalists? under_used?")
LAYER |= fields(number="gini entropy_bits max_entropy_bits hash_gini? max_load? gate_entropy_nats?")
LAYER |= fields(number="query_collinearity? query_effective_rank?")
COLLECTED = fields(text="run split router? state?", texts="notes", number="loss favour?", switch="center_queries?")
COLLECTED |= fields(count="step num_experts top_k stories num_tokens newest?", counts="depths")
BRANCH = fields(text="name", number="share", numbers="by_layer") | {
    "words": [fields(text="text", count="count", number="share")]
}
ANALYSIS = fields(count="format_version", texts="missing") | {
    "of?": fields(count="step? newest?", text="state?"),
    "collected?": COLLECTED,
    "rules": fields(text="generalists under_used hash_gini"),
    "layers": [LAYER],
    "branches?": [BRANCH],
    "movement": [fields(count="layer", numbers="drift")],
    "figures": [fields(text="title caption") | {"name": NAME}],
}
MOVING = fields(count="layer width height", switch="still", text="xLabel yLabel", rows="paths usage distance")
MOVEMENT = fields(counts="steps") | {"layers": [MOVING | {"hues": [matches("#[0-9a-f]{6}")]}]}
CHANGES = "class_change? other_change? random_class_change? random_other_change? effect? p_value? p_adjusted?"
GUILD = fields(text="class family verdict reason", count="layer", counts="experts")
GUILD |= fields(number="npmi? q_value? p_association?") | {
    "random_keys?": fields(number="p_adjusted? own_bits?", numbers="random_bits?"),
    "knockout?": fields(number=CHANGES),
    "words?": [fields(text="text", count="count")],
    "contexts?": [fields(text="before word after")],
}
BY_LAYER = fields(
    count="layer", number="nmi? mi_bits? null_mean_bits? p_value? p_adjusted?", numbers="random_keys_nmi?"
)
CONTROL: dict[str, Form] = {
    "passed?": fields(count="enrichment? association? random_keys? knockout?"),
    "families?": [fields(text="family") | {"layers": [BY_LAYER | fields(bounds="interval?")]}],
}
COMMUNITY = fields(count="layer", number="modularity? null_mean? null_sd? p_value?", numbers="random_keys_modularity?")
GUILDS = CONTROL | fields(text="of? split? labels?", number="level?", count="num_tokens?", texts="notes?")
GUILDS |= {
    "guilds?": [GUILD],
    "communities?": [COMMUNITY | fields(rows="groups?")],
    "depth?": fields(text="statement?"),
    "swap?": [fields(count="layer", number="loss_change?", bounds="interval?")],
    "control?": fields(text="run") | CONTROL,
}


def read_part(run: Path, part: str, form: Form, problems: list[str]) -> Any:
    """A file of a run's analysis; None where it is missing, and where it cannot be used, which `problems` is told."""
    try:
        return fit(read_object(inside(run, f"analysis/{part}")), form)
    except FileNotFoundError:
        return None
    except (ConfigError, OSError) as error:
        why = str(error) if isinstance(error, MisfitError) else "cannot be used"
        problems.append(f"analysis/{part} {why} and {RENEW}")
        return None


def read_movement(run: Path, problems: list[str]) -> Any:
    """movement.json, where every layer has all its keys in every snapshot."""
    found = read_part(run, "movement.json", MOVEMENT, problems)
    steps, layers = (found["steps"], found["layers"]) if found else ([], [])
    whole = len(layers) > 0 and len(steps) > 1 and sorted(set(steps)) == steps
    for layer in layers:
        for part, width in (("paths", 2), ("usage", 1), ("distance", 1)):
            whole &= [width * len(layer["hues"]) or None] * len(steps) == list(map(len, layer[part]))
    if found and not whole:
        problems.append(f"analysis/movement.json does not fit and {RENEW}")
    return found if whole else None
