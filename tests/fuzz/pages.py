"""What a page may hold, whatever words went into it: no script but our own, no request, nothing unescaped."""

import base64
import hashlib
import json
import re
from collections.abc import Collection
from html.parser import HTMLParser

FORBIDDEN = {"base", "object", "embed", "form", "applet", "frame", "frameset"}
FENCED = re.compile(r"(`{3,}).*?\1|`[^`\n]*`", re.S)


class PageReader(HTMLParser):
    """Collects a page's scripts, its policy, its frames, and whatever else could run or ask for something."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[tuple[str, str]] = []  # type and text
        self.frames: list[str] = []
        self.policy, self.faults = "", []
        self.in_script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if tag == "script":
            self.in_script = True
            self.scripts.append((found.get("type", ""), ""))
        if tag == "meta" and found.get("http-equiv", "").lower() == "content-security-policy":
            self.policy = self.policy or found["content"]
        elif tag == "meta" and "http-equiv" in found:
            self.faults.append(f"meta http-equiv {found['http-equiv']!r}")
        if tag == "iframe":
            self.frames.append(found.get("srcdoc", ""))
            if "sandbox" not in found or "allow-same-origin" in found["sandbox"]:
                self.faults.append("a frame without a sandbox")
        if tag in FORBIDDEN:
            self.faults.append(f"an element {tag}")
        for name, value in found.items():
            if name.startswith("on"):
                self.faults.append(f"an attribute {name}")
            if name in ("src", "href", "action", "data", "poster", "xlink:href") and tag != "a":
                if not value.startswith(("data:", "#")):
                    self.faults.append(f"{tag} {name}={value[:40]!r}")
            elif name == "href" and re.match(r"\s*(javascript|data|vbscript):", value, re.I):
                self.faults.append(f"a link to {value[:40]!r}")

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self.in_script = False

    def handle_data(self, data: str) -> None:
        if self.in_script:
            kind, text = self.scripts[-1]
            self.scripts[-1] = (kind, text + data)


def read_page(html: str) -> PageReader:
    reader = PageReader()
    reader.feed(html)
    reader.close()
    return reader


def hash_script(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def list_programs(html: str) -> list[str]:
    """The hashes of what a page, and each page within it, runs."""
    reader = read_page(html)
    own = [hash_script(text) for kind, text in reader.scripts if kind != "application/json"]
    return own + [digest for frame in reader.frames for digest in list_programs(frame)]


def find_fault(html: str, programs: Collection[str]) -> str | None:
    """What is wrong with a page, or None. programs: the hashes of our own scripts."""
    reader = read_page(html)
    if reader.faults:
        return reader.faults[0]
    if not reader.policy.startswith("default-src 'none'") or "script-src" not in reader.policy:
        return f"the policy is {reader.policy[:60]!r}"
    allowed = reader.policy.partition("script-src")[2].partition(";")[0].split()
    foreign = [word for word in allowed if word != "'none'" and word.strip("'") not in programs]
    if foreign:
        return f"the policy allows {foreign[0][:60]}"
    for kind, text in reader.scripts:
        if kind == "application/json":
            try:
                json.loads(text)
            except ValueError:
                return "data that is no JSON"
        elif hash_script(text) not in programs:
            return f"a script that is not ours: {text[:40]!r}"
    return None  # a frame obeys the policy of the page around it too: what that does not allow does not run


def find_markup(markdown: str) -> str | None:
    """Raw HTML in Markdown outside of code, where a reader's program might obey it."""
    found = re.search(r"(?<!\\)<(script|img|iframe|svg|style|base|object)\b", FENCED.sub("", markdown), re.I)
    return f"raw {found[0]!r} in Markdown" if found else None
