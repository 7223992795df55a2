"""Pages as HTML: one file each, with everything inside, that makes no request and runs no script but its own."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from some_moe.glass.inspect.movement import LayerMovement
from some_moe.glass.inspect.traces import Trace
from some_moe.glass.page.blocks import Block, Frame, Page, Section, TraceView
from some_moe.glass.page.terminal import expert_hue
from some_moe.system.reading import clean, read_bytes

MOST_POINTS = 150_000  # of all layers and snapshots of an animation together: a page of a few megabytes
LARGEST_FIGURE = 1 << 26  # bytes


def render_page(page: Page) -> str:
    """The page as one HTML file."""
    blocks = [block for section in page.sections for block in section.blocks]
    kinds = {type(block) for block in blocks}
    scripts = [read_template("trace.js")] if TraceView in kinds else []
    framed = [read_template("movement.js")] if Frame in kinds else []  # a page within a page runs what both allow
    policy = security_policy([hash_script(script) for script in (*scripts, *framed)])
    styles, programs = Markup(read_template("page.css")), [Markup(script) for script in scripts]
    return fill_template("page.html", page=page, style=styles, scripts=programs, policy=policy)


def render_fragment(title: str, blocks: Sequence[Block]) -> str:
    """Some parts under a title, as HTML that can stand within a notebook: it has no script and no style."""
    return fill_template("fragment.html", title=title, blocks=blocks)


def render_trace(trace: Trace) -> str:
    """A page with one trace."""
    loss = "" if trace.loss is None else f" Its mean loss is {trace.loss:.3f} nats per token."
    layers = f"{len(trace.layers)} layer" + ("" if len(trace.layers) == 1 else "s")
    summary = f"{len(trace.tokens)} tokens, each with the {trace.top_k} of {trace.num_experts} experts that ran for it "
    kicker = f"Trace · {trace.run}, step {trace.step:,}"
    sections = [Section("Trace", [TraceView(trace)])]
    return render_page(Page("The path of every token", kicker, f"{summary}in {layers}.{loss}", sections))


def trace_data(trace: Trace) -> dict[str, Any]:
    """What the page's script needs of a trace."""
    return trace.to_dict() | {"hues": [expert_hue(expert) for expert in range(trace.num_experts)]}


# --- the keys in movement -----------------------------------------------------------------------------------


def describe_movement(movements: Sequence[LayerMovement], colours: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """What movement.json holds. movements: at least one layer's; colours: of the experts, by layer."""
    frames = _choose_frames(movements)
    layers = [_describe_layer(movement, frames, colours[movement.layer]) for movement in movements]
    return {"steps": movements[0].steps[frames].tolist(), "layers": layers}


def render_movement(run_name: str, data: dict[str, Any]) -> str:
    """The page. data: what `describe_movement` gave."""
    steps, script = data["steps"], read_template("movement.js")
    return fill_template(
        "movement.html",
        policy=Markup(security_policy([hash_script(script)])),
        run=run_name,
        first_step=f"{steps[0]:,}",
        last_step=f"{steps[-1]:,}",
        style=Markup(read_template("movement.css")),
        data=data,
        script=Markup(script),
    )


def _choose_frames(movements: Sequence[LayerMovement]) -> np.ndarray:
    """The snapshots to show: all, or evenly chosen ones where there would be too many points."""
    num_frames = len(movements[0].steps)
    points_a_frame = sum(movement.paths.shape[1] for movement in movements)
    most = max(2, MOST_POINTS // points_a_frame)
    return np.unique(np.linspace(0, num_frames - 1, min(num_frames, most)).round().astype(int))


def _describe_layer(movement: LayerMovement, frames: np.ndarray, hues: Sequence[str]) -> dict[str, Any]:
    """One layer for the page's script. A path's coordinates are whole numbers within width × height."""
    paths = movement.paths[frames]
    low = paths.min((0, 1))
    span = np.ptp(paths.reshape(-1, 2), axis=0)
    unit = max(float(span.max()), 1e-9) / 1000
    first, second = 100 * movement.variance
    return {
        "layer": movement.layer,
        "hues": list(hues),
        "paths": ((paths - low) / unit).round().astype(int).reshape(len(frames), -1).tolist(),
        "width": max(1, round(float(span[0]) / unit)),
        "height": max(1, round(float(span[1]) / unit)),
        "usage": movement.usage[frames].astype(float).round(3).tolist(),
        "distance": movement.distance[frames].round(3).tolist(),
        "still": not movement.distance.any(),
        "xLabel": f"axis 1 ({first:.0f} % of variance)",
        "yLabel": f"axis 2 ({second:.0f} %)",
    }


# --- parts of pages -----------------------------------------------------------------------------------------


def hash_script(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def security_policy(hashes: list[str]) -> str:
    """No request to anywhere, and no script but the page's own, which are known by their hashes."""
    allowed = " ".join(f"'{digest}'" for digest in hashes) or "'none'"
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}"


def embed_image(path: Path) -> str:
    """A PNG file as a data URI."""
    return f"data:image/png;base64,{base64.b64encode(read_bytes(path, LARGEST_FIGURE)).decode()}"


def mark_code(text: str) -> Markup:
    """Escape a sentence, and set what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def to_json(value: Any) -> Markup:
    """JSON that can stand inside a script element, whatever its strings hold."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


def fill_template(name: str, **values: Any) -> str:
    return str(clean(_environment().get_template(name).render(**values)))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("some_moe.glass.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "code": mark_code, "json": to_json, "image": embed_image, "hue": expert_hue, "trace_data": trace_data,
    }  # fmt: skip
    return environment


def read_template(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")
