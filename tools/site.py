"""Makes the documentation site, offline: `make site`, then open build/site/index.html.

Pages are those of docs/ and of the repository's root, the examples and notebooks as they are, and a reference that is
made from docstrings, settings and each command's help. Links are rewritten to where things are on the site, and every
one of them is followed: a dead link is an error. `--sources` writes the Markdown alone, without the generator.
"""

import importlib
import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import is_dataclass
from html import unescape
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from urllib.parse import unquote

import some_moe
from some_moe.cli import COMMANDS, Commands, Parser, write
from some_moe.config import Config, RunConfig
from some_moe.config.base import field_docs
from some_moe.errors import FAILED, ConfigError

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^(```.*?^```$)", re.DOTALL | re.MULTILINE)
NESTED = re.compile(r"^ {2,3}(?=[-*] |\d+\. )", re.MULTILINE)
# Where a page of the repository stands on the site, and under which heading; pages of docs/ not named here are how-tos.
PLACES = {
    "README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "LOG.md": "log.md",
    "benchmarks/RESULTS.md": "benchmarks.md",
}  # fmt: skip
# The contents: in the order in which a newcomer asks. A page that stands nowhere comes last under its heading.
CONTENTS = {
    "Start": ("index.md", "first-steps.md"),
    "Concepts": ("gravity.md", "glossary.md", "kernels.md"),
    "How-to": (
        "data.md", "live.md", "glassbox.md", "inside.md", "sweep.md", "huggingface.md", "growing.md", "adaptation.md",
        "queue.md",
        "distributed.md", "security.md",
    ),
    "Examples": (),
    "Reference": (
        "commands.md", "reference/cli.md", "reference/settings.md", "reference/python.md", "runs.md", "contributing.md",
    ),
    "Results": ("results.md", "audit.md", "benchmarks.md", "log.md", "changelog.md"),
}  # fmt: skip
HEADINGS = {"examples": "Examples", "studies": "Results"}  # of folders; other pages are how-tos
SHORT_NAMES = {"index.md": "What this is", "security.md": "Security", "reference/cli.md": "Help of every command"}
# The reference of Python, in the order of its use; other names of `some_moe` follow under "More".
PYTHON = {
    "Train, open, score": ("some_moe.train", "some_moe.load", "some_moe.training.runs.Run"),
    "Look inside": (
        "some_moe.trace", "some_moe.analyze", "some_moe.report", "some_moe.glass.inspect.traces.Trace",
        "some_moe.glass.notebook.LayerKeys", "some_moe.glass.notebook.Usage", "some_moe.glass.results.Result",
    ),
    "The model": ("some_moe.SomeLM", "some_moe.SomeLayer", "some_moe.accelerate"),
    "Grow, merge, adapt": ("some_moe.grow", "some_moe.merge", "some_moe.prune", "some_moe.adapt"),
    "Other tools": ("some_moe.export", "some_moe.graft", "some_moe.hf.GravityCallback"),
}  # fmt: skip
PUBLIC_MODULES = ("some_moe.hooks",)
GENERATOR, MATHS = "zensical", "latex2mathml"
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
CONFIG = """\
[project]
site_name = "SoME"
site_description = "The open laboratory for Self-Organizing Mixtures of Experts"
docs_dir = "docs"
site_dir = "site"
use_directory_urls = false
nav = {nav}

[project.theme]
font = false
features = ["navigation.sections", "navigation.top", "content.code.copy"]

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
"""


def main(arguments: list[str]) -> int:
    parser = Parser("python -m tools.site", "Make the documentation site, without a network, and follow every link.")
    parser.add_argument("--out", default="build", metavar="DIR", help="where docs/ and site/ are made (build)")
    parser.add_argument("--sources", action="store_true", help="write the Markdown alone")
    options = parser.parse(arguments)
    out = Path(options.out).absolute()
    for package in () if options.sources else (GENERATOR, MATHS):
        if find_spec(package) is None:
            raise ConfigError(f"the site needs {package}, which is not installed; run pip install 'some-moe[docs]'")
    pages = stage(out)
    if options.sources:
        return write(f"{len(pages)} pages in {out / 'docs'}\n")
    shutil.rmtree(out / "site", ignore_errors=True)
    done = subprocess.run([sys.executable, "-m", GENERATOR, "build"], cwd=out, capture_output=True, text=True)
    if done.returncode:
        print(f"site: {GENERATOR} has failed\n{done.stdout}{done.stderr}", file=sys.stderr)
        return FAILED
    for path in (out / "site").rglob("*.html"):
        path.write_text(draw_formulas(path.read_text(encoding="utf-8")), encoding="utf-8")
    dead = find_dead_links(out / "site")
    for sentence in dead:
        print(f"site: {sentence}", file=sys.stderr)
    write(f"{len(pages)} pages in {out / 'site'}\n")
    return FAILED if dead else 0


# --- the pages ------------------------------------------------------------------------------------------------


def stage(out: Path) -> list[str]:
    """Write every page, and what pages show or link to, to out/docs; and the generator's config beside it."""
    docs = out / "docs"
    shutil.rmtree(docs, ignore_errors=True)
    texts, places = collect_pages()
    wanted: set[str] = set()
    for origin, text in texts.items():
        place = places[origin]
        target = docs / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(rewrite_links(text, origin, places, wanted), encoding="utf-8")
    for origin in sorted(wanted):  # figures, results, sources: as they are
        target = docs / places.get(origin, f"files/{origin}")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / origin, target)
    pages = sorted(places[origin] for origin in texts)
    (out / "zensical.toml").write_text(CONFIG.format(nav=format_nav(pages)), encoding="utf-8")
    return pages


def collect_pages() -> tuple[dict[str, str], dict[str, str]]:
    """The text of each page by its path in the repository, and where each stands on the site."""
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in PLACES if (ROOT / name).is_file()}
    places = {name: PLACES[name] for name in texts}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = path.relative_to(ROOT).as_posix()
        texts[name], places[name] = path.read_text(encoding="utf-8"), path.relative_to(ROOT / "docs").as_posix()
    for path in sorted((ROOT / "examples").rglob("*")):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in (".py", ".ipynb"):
            texts[name] = show_program(path) if path.suffix == ".py" else show_notebook(path)
            places[name] = f"examples/{path.stem}.md" if path.suffix == ".py" else f"examples/{path.stem}_notebook.md"
    made = {"python": describe_python(), "settings": describe_settings(), "cli": describe_commands()}
    for name, text in made.items():
        texts[f"reference/{name}.md"] = text
        places[f"reference/{name}.md"] = f"reference/{name}.md"
    return texts, places


def rewrite_links(text: str, origin: str, places: dict[str, str], wanted: set[str]) -> str:
    """The text with links that lead where things are on the site, and lists within lists indented as the generator
    asks for it; files that it links to are added to `wanted`."""

    def move(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        path, _, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        found = os.path.normpath(os.path.join(os.path.dirname(origin), unquote(path)))
        if (ROOT / found).is_dir():
            return before.lstrip("!")[1:-2]  # a folder has no page: its words stay
        if found not in places:
            wanted.add(found)
        here, there = os.path.dirname(places[origin]), places.get(found, f"files/{found}")
        return before + os.path.relpath(there, here or ".") + (f"#{anchor}" if anchor else "") + after

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(move, NESTED.sub("    ", part)) for part in parts)


def format_nav(pages: list[str]) -> str:
    """The contents as TOML."""
    named = {page for inner in CONTENTS.values() for page in inner}
    groups = {title: [page for page in inner if page in pages] for title, inner in CONTENTS.items()}
    for page in pages:
        if page not in named:
            groups[HEADINGS.get(page.partition("/")[0], "How-to")].append(page)
    lines = []
    for title, inner in groups.items():
        shown = [f'{{ "{SHORT_NAMES[page]}" = "{page}" }}' if page in SHORT_NAMES else f'"{page}"' for page in inner]
        lines.append(f'  {{ "{title}" = [{", ".join(shown)}] }},')
    return "[\n" + "\n".join(lines) + "\n]"


def draw_formulas(page: str) -> str:
    """A page with its formulas as MathML, which browsers show without a script."""
    if not FORMULA.search(page):
        return page
    convert = importlib.import_module(f"{MATHS}.converter").convert
    return FORMULA.sub(lambda found: convert(unescape(found[2]), "inline" if found[1] == "span" else "block"), page)


def show_program(path: Path) -> str:
    code = path.read_text(encoding="utf-8")
    about = (inspect.cleandoc(code.split('"""')[1])).split("\n")[0]
    return f"# {path.stem.replace('_', ' ').capitalize()}\n\n{about}\n\n```python\n{code}```\n"


def show_notebook(path: Path) -> str:
    """A notebook's cells; it holds no outputs."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    parts[0] = parts[0].replace("# ", "# Notebook: ", 1)
    return "\n\n".join(parts) + "\n"


# --- the reference --------------------------------------------------------------------------------------------


def describe_python() -> str:
    """Every public name with its signature and docstring, and the modules that are public as a whole."""
    parts = [
        "# Python",
        "What `import some_moe` offers. Heavy packages are loaded when a name is first used. Bad input raises "
        "`some_moe.errors.ConfigError`: one sentence that names the value and the cure.",
    ]
    named = {name for inner in PYTHON.values() for name in inner}
    public = {name: getattr(some_moe, name) for name in some_moe.__all__}
    configs = [name for name, found in public.items() if isinstance(found, type) and issubclass(found, Config)]
    more = [name for name in (f"some_moe.{one}" for one in public if one not in configs) if name not in named]
    for title, inner in (PYTHON | ({"More": tuple(more)} if more else {})).items():
        parts.append(f"## {title}")
        for name in inner:
            parts += describe_object(name, resolve_name(name))
    told = ", ".join(f"`some_moe.{name}`" for name in configs)
    parts += ["## Settings", f"{told}: every field is in [settings](settings.md), with its default and meaning."]
    for module in PUBLIC_MODULES:
        found = importlib.import_module(module)
        parts += [f"## {module}", quote_text(inspect.getdoc(found) or "")]
        for name in found.__all__:
            parts += describe_object(f"{module}.{name}", getattr(found, name))
    return "\n\n".join(parts) + "\n"


def describe_object(name: str, found: Any) -> Iterator[str]:
    """A heading, the signature, the docstring; of a class its methods and values too."""
    home, _, short = name.rpartition(".")
    public = home in ("some_moe", *PUBLIC_MODULES)
    yield f"### {name}" if public else f"### {short}"
    if not public:
        yield f"In `{home}`."
    yield f"```python\n{format_fields(found) if is_dataclass(found) else format_signature(short, found)}\n```"
    yield format_docstring(found)
    if not inspect.isclass(found):
        return
    made = inspect.getattr_static(found, "__init__")
    if str(getattr(made, "__module__", "")).startswith("some_moe") and not is_dataclass(found):
        yield format_docstring(made)
    for member, value in inspect.getmembers(found):
        inner = value.func if hasattr(value, "func") else value.fget if isinstance(value, property) else value
        own = inspect.isfunction(inner) and str(inner.__module__).startswith("some_moe")
        if own and not member.startswith("_") and inspect.getdoc(inner):
            shown = format_signature(f"{short}.{member}", inner)
            if inner is not value:  # read, not called
                shown = shown.replace("() -> ", ": ")
            yield f"```python\n{shown}\n```"
            yield format_docstring(inner)


def format_signature(name: str, found: Any) -> str:
    """A call as one reads it, a long one with an argument a line."""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return name

    def shorten(one: object) -> str:
        text = re.sub(r"= <.*>$", "= …", str(one))  # a function as default: where it lies is of no interest
        text = re.sub(r"(: |^)'([^']*)'", r"\1\2", text).replace("~", "")  # annotations that were written as text
        return re.sub(r"\b(?:some_moe|pathlib|collections|torch|typing)\.(?:\w+\.)*(?=[A-Z])", "", text)

    lines: list[str] = []
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not any(line.startswith("*") for line in lines):
            lines.append("*")
        if one.name != "self":
            lines.append(shorten(one))
    given = inspect.formatannotation(signature.return_annotation)
    returned = (
        "" if inspect.isclass(found) or signature.return_annotation is signature.empty else f" -> {shorten(given)}"
    )
    text = f"{name}({', '.join(lines)}){returned}"
    return text if len(text) <= 100 else f"{name}(\n" + "".join(f"    {line},\n" for line in lines) + f"){returned}"


def format_fields(found: Any) -> str:
    """The fields of a dataclass as they stand in its source, each with what is said of it."""
    lines = inspect.getsource(found).split("\n")
    return "\n".join([f"class {found.__name__}:", *(line for line in lines if re.match(r" {4}\w+: ", line))])


def format_docstring(found: Any) -> str:
    """A docstring; what it says of parameters ("out: the folder. steps: how many") becomes a list."""
    names = ""
    with suppress(ValueError):
        names = "|".join(inspect.signature(found).parameters)
    begins = re.compile(rf"(?:^|(?<=[.;] ))((?:{names})(?:, (?:{names}))*): ")
    parts = []
    for paragraph in quote_text(inspect.getdoc(found) or "").split("\n\n"):
        before, *rest = begins.split(" ".join(paragraph.split("\n"))) if names else [paragraph]
        items = [f"- `{name}`: {text.strip(' ;.')}." for name, text in zip(rest[::2], rest[1::2], strict=True)]
        parts.append(paragraph if before or not items else "\n".join(items))
    return "\n\n".join(parts)


def quote_text(text: str) -> str:
    """A docstring as Markdown: blocks that are indented are code, and no sign is taken for markup."""
    return text.replace("<", "&lt;").replace("*", "\\*")


def describe_settings() -> str:
    """Every field of every room."""
    parts = ["# Settings", "Each is a flag, `--ROOM.FIELD VALUE`, and a line of config.yaml; `some init` writes one."]
    for room, field in RunConfig.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Config):
            parts += [f"## {room}", " ".join((inner.__doc__ or "").split())]
            rows = ["| field | default | meaning |", "| --- | --- | --- |"]
            docs, defaults = field_docs(inner), inner().model_dump(mode="json")
            for name, default in defaults.items():
                meaning = docs[name].replace("|", "\\|").replace("<", "&lt;")
                rows.append(f"| `{room}.{name}` | `{json.dumps(default)}` | {meaning} |")
            parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def describe_commands() -> str:
    """The help of every command."""
    parts = ["# The help of every command"]
    for words, target in list_targets((), COMMANDS):
        said = io.StringIO()
        with redirect_stdout(said), suppress(SystemExit):
            resolve_name(f"some_moe.commands.{target}")(["--help"])
        parts += [f"## some {' '.join(words)}", f"```\n{said.getvalue()}```"]
    return "\n\n".join(parts) + "\n"


def list_targets(path: tuple[str, ...], commands: Commands) -> Iterator[tuple[tuple[str, ...], str]]:
    for name, (_, target) in commands.items():
        if isinstance(target, str):
            yield (*path, name), target
        else:
            yield from list_targets((*path, name), target)


# --- the links ------------------------------------------------------------------------------------------------


class Links(HTMLParser):
    """What a page links to, what it loads, and the places in it that can be linked to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {value for name in ("id", "name") if (value := found.get(name))}
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        elif tag == "link" and found.get("href") and found.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(str(found["href"]))
        elif found.get("src"):
            self.loads.append(str(found["src"]))


def find_dead_links(site: Path) -> list[str]:
    """A sentence for every link to a page or place that is not there, and for all that is loaded from elsewhere."""
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        here = path.relative_to(site)
        for target in [*page.links, *page.loads]:
            if re.match(r"(https?:)?//", target):
                if target in page.loads:
                    found.append(f"{here} loads {target}, which a reader without a network has not")
                continue
            if target.startswith(("data:", "mailto:", "javascript:", "#__")):  # the last are the generator's own
                continue
            name, _, anchor = target.partition("#")
            base = site if name.startswith("/") else path.parent
            place = path if not name else Path(os.path.normpath(base / unquote(name.split("?")[0]).lstrip("/")))
            place = place / "index.html" if place.is_dir() else place
            if not place.is_file():
                found.append(f"{here} links to {target}, which is not there")
            elif anchor and place in pages and unquote(anchor) not in pages[place].ids:
                found.append(f"{here} links to {target}, where there is no such place")
    return found


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        print(f"site: {error}", file=sys.stderr)
        sys.exit(error.code)
