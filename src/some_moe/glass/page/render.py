"""Pages as HTML: one file each, with everything inside, that makes no request and runs no script but its own."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from some_moe.glass.inspect.traces import Trace
from some_moe.glass.page.blocks import Block, Frame, Page, Section, TraceView
from some_moe.glass.page.terminal import expert_hue

MEDIA_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}


def render_page(page: Page) -> str:
    """The page as one HTML file."""
    blocks = [block for section in page.sections for block in section.blocks]
    scripts = [read_template("trace.js")] if any(isinstance(block, TraceView) for block in blocks) else []
    hashes = [hash_script(script) for script in scripts]
    for block in blocks:
        if isinstance(block, Frame):  # a page within a page runs only what both allow
            hashes += re.findall(r"'(sha256-[A-Za-z0-9+/=]+)'", read_text(block.file))
    styles, programs = Markup(read_template("page.css")), [Markup(script) for script in scripts]
    return fill_template("page.html", page=page, style=styles, scripts=programs, policy=security_policy(hashes))


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


def hash_script(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def security_policy(hashes: list[str]) -> str:
    """No request to anywhere, and no script but the page's own, which are known by their hashes."""
    allowed = " ".join(f"'{digest}'" for digest in hashes) or "'none'"
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}"


def read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def embed_image(path: Path) -> str:
    """The file as a data URI."""
    return f"data:{MEDIA_TYPES[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"


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
    return _environment().get_template(name).render(**values)


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
        "contents": read_text,
    }  # fmt: skip
    return environment


def read_template(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")
