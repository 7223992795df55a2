"""What the page asks for, and by which function it is answered. Nothing here writes to a run."""

import asyncio
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from some_moe.config import ConfigError
from some_moe.errors import SomeError
from some_moe.live.answers import AskedError, answer_json, ask_number, in_thread, read_body, stream
from some_moe.live.desk import Desk, write
from some_moe.live.keys import Galaxy, Insight, read_insight
from some_moe.live.logs import EVALUATION, LAYER, STEP, Place, pick_metrics, pick_samples, read_piece, thin
from some_moe.live.plans import stamp_of
from some_moe.live.watched import Watch, Watched, stride
from some_moe.system.forms import Form, is_count, is_number, is_text, matches
from some_moe.system.reading import clean
from some_moe.training.run_folder import RunFolder

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

STATIC = Path(__file__).parent / "static"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
TICK_SECONDS, BEAT_SECONDS = 0.6, 15.0
MOST_STREAMS, MOST_SHARED = 64, 16
MOST_TEXT, MOST_NEW_TOKENS = 8_000, 1_000
PAIRS: Form = [[is_count]]
CHECKPOINT = matches(r"best|last|step-(0|[1-9]\d{0,17})")
TRACE: dict[str, Form] = {
    "text": is_text, "checkpoint?": CHECKPOINT, "forbid?": PAIRS, "force?": PAIRS, "favour?": is_number,
}  # fmt: skip
GENERATE: dict[str, Form] = {
    "prompt": is_text, "checkpoint?": CHECKPOINT, "max_tokens?": is_count, "temperature?": is_number,
    "top_p?": is_number, "seed?": is_count,
}  # fmt: skip


class Page:
    """What `some watch` answers. Runs are a fixed dict: what is not in it is not there."""

    def __init__(self, watch: Watch, device: str = "cpu") -> None:
        self.watch, self.desk = watch, Desk(device)
        self.galaxies: dict[str, Galaxy] = {}
        self.files = {f"/static/{file.name}": file for file in STATIC.iterdir() if file.suffix in KINDS}
        self.streams = 0
        self.stamps: dict[str, int] = {}  # when what was collected of a run was written
        self.refreshing: asyncio.Task[None] | None = None
        self.sharing = threading.Lock()
        self.shared: dict[tuple[str, str, str], str] = {}  # what was made of a piece of a log

    def routes(self) -> list[Any]:
        from starlette.routing import Route

        gets = {
            "/events": self.events, "/runs": self.list_runs, "/runs/{run}/curve": self.curve,
            "/runs/{run}/settings": self.settings, "/runs/{run}/keys": self.keys, "/runs/{run}/expert": self.expert,
            "/runs/{run}/insight": self.insight, "/runs/{run}/branches": self.branches,
        }  # fmt: skip
        posts = {"trace": self.trace, "generate": self.generate, "look": self.look}
        found = [Route(path, answer, methods=["GET"]) for path, answer in gets.items()]
        found += [Route(f"/runs/{{run}}/{name}", answer, methods=["POST"]) for name, answer in posts.items()]
        return [*found, Route("/", self.file), Route("/favicon.ico", self.file), Route("/static/{name}", self.file)]

    def find(self, request: "Request") -> Watched:
        run = self.watch.runs.get(request.path_params["run"])
        if run is None:
            raise AskedError(404, "there is no such run")
        run.refresh()
        return run

    async def file(self, request: "Request") -> "Response":
        """One of our own files, by its whole name."""
        from starlette.responses import Response

        path = {"/": "/static/index.html", "/favicon.ico": "/static/icon.svg"}.get(request.url.path, request.url.path)
        if path not in self.files:
            raise AskedError(404, "there is no such file")
        file = self.files[path]
        return Response(file.read_bytes(), media_type=KINDS[file.suffix])

    # --- as it grows ------------------------------------------------------------------------------------------

    async def list_runs(self, _: "Request") -> "Response":
        await in_thread(self.watch.refresh)
        return answer_json({"runs": [run.summary for run in self.watch.runs.values()], "queues": self.watch.queues})

    async def refresh(self) -> None:
        """Look at the folders, once for all pages that wait for it."""
        if self.watch.is_stale:
            if self.refreshing is None or self.refreshing.done():
                self.refreshing = asyncio.create_task(in_thread(self.watch.refresh))
            await asyncio.shield(self.refreshing)

    async def curve(self, request: "Request") -> "Response":
        run = await in_thread(self.find, request)
        return answer_json(await in_thread(run.read_curve))

    async def events(self, request: "Request") -> "Response":
        """All that changes, as server-sent events: runs, and the logs of one of them from the places that are given."""
        from starlette.responses import StreamingResponse

        run = self.watch.runs.get(request.query_params.get("run", ""))
        if "run" in request.query_params and run is None:
            raise AskedError(404, "there is no such run")
        if self.streams >= MOST_STREAMS:
            raise AskedError(503, f"{MOST_STREAMS} pages are open already; close one")
        places = {name: Place.parse(request.query_params.get(name, "")) for name in ("metrics", "samples")}
        return StreamingResponse(self.tell(request, run, places), media_type="text/event-stream")

    async def tell(self, request: "Request", run: Watched | None, places: dict[str, Place]) -> AsyncIterator[str]:
        self.streams += 1
        told: dict[str, int] = {}  # version of each run that was told
        queues: Any = None
        beat = time.monotonic()
        try:
            yield event("hello", {"step": STEP, "evaluation": EVALUATION, "layer": LAYER})
            while not request.scope["some_moe.closing"]():
                await self.refresh()
                news = [one for one in self.watch.runs.values() if told.get(one.key) != one.version]
                if news:
                    told |= {one.key: one.version for one in news}
                    yield event("runs", [one.summary for one in news])
                if self.watch.queues != queues:
                    queues = self.watch.queues
                    yield event("queues", queues)
                for name in places if run is not None else ():
                    while run is not None and run.sizes[name] != places[name].byte:
                        text, place = await in_thread(self.read_log, run, name, places[name])
                        if text:
                            yield text
                        if place.byte == places[name].byte:
                            break  # half a line, or a log that is gone
                        places[name] = place
                if run is not None and run in news:
                    yield event("caught-up", {})
                if time.monotonic() - beat > BEAT_SECONDS:
                    beat = time.monotonic()
                    yield ": still here\n\n"
                await asyncio.sleep(TICK_SECONDS)
        finally:
            self.streams -= 1

    def read_log(self, run: Watched, name: str, place: Place) -> tuple[str, Place]:
        """The events of what follows a place in a log, and the next place.

        Several pages read the same: what was made of a piece is kept for a while.
        """
        try:
            piece = read_piece(run.path, f"{name}.jsonl", place)
        except (SomeError, OSError):
            return "", place
        text = event("again", {"log": name, "place": str(piece.place)}) if piece.again else ""
        if not piece.lines:
            return text, piece.place
        begin = Place() if piece.again else place
        key = (run.key, name, f"{begin}:{piece.place}")
        with self.sharing:
            if key not in self.shared:
                every = stride(run.path, len(piece.lines))
                rows: Any = pick_metrics(thin(piece.lines, every)) if name == "metrics" else pick_samples(piece.lines)
                while len(self.shared) >= MOST_SHARED:
                    del self.shared[next(iter(self.shared))]
                self.shared[key] = event(name, {"place": str(piece.place), "rows": rows})
            return text + self.shared[key], piece.place

    async def settings(self, request: "Request") -> "Response":
        """Every setting, and what it is in another run."""
        run = await in_thread(self.find, request)
        other = self.watch.runs.get(request.query_params.get("against", ""))
        own = {} if run.config is None else run.config.flatten()
        if other is not None:
            await in_thread(other.refresh)
        others = {} if other is None or other.config is None else other.config.flatten()
        rows = [[name, clean(value), clean(others.get(name))] for name, value in own.items()]
        return answer_json({"rows": rows, "compared": bool(others), "env": await in_thread(read_env, run)})

    # --- the galaxy ---------------------------------------------------------------------------------------------

    def galaxy(self, run: Watched) -> Galaxy:
        if run.key not in self.galaxies:
            self.galaxies.clear()  # the frames of one run at a time are kept
            self.galaxies[run.key] = Galaxy(run)
        return self.galaxies[run.key]

    async def keys(self, request: "Request") -> "Response":
        from starlette.responses import Response

        run = await in_thread(self.find, request)
        step = self.ask_snapshot(request, run, "step")
        fit_at = self.ask_snapshot(request, run, "fit")
        frame = await in_thread(self.galaxy(run).draw, step, fit_at)
        return Response(frame, media_type="application/octet-stream")

    @staticmethod
    def ask_snapshot(request: "Request", run: Watched, name: str) -> int:
        step = ask_number(request, name, run.snapshots[-1] if run.snapshots else 0)
        if step not in run.snapshots:
            raise AskedError(404, f"there is no snapshot of step {step}")
        return step

    async def expert(self, request: "Request") -> "Response":
        """All that is known of one expert."""
        run = await in_thread(self.find, request)
        layer, expert = ask_number(request, "layer"), ask_number(request, "expert")
        if not (layer < run.summary.get("layers", 0) and expert < run.summary.get("experts", 0)):
            raise AskedError(404, "there is no such expert")
        found: dict[str, Any] = {"layer": layer, "expert": expert}
        if run.snapshots and run.summary.get("has_keys"):
            step = self.ask_snapshot(request, run, "step")
            found |= await in_thread(self.galaxy(run).describe, layer, expert, step)
        seen = await in_thread(self.find_insight, run)
        return answer_json(found | ({} if seen is None else await in_thread(seen.quote, layer, expert)))

    def find_insight(self, run: Watched) -> Insight | None:
        stamp = stamp_of(run.path / "analysis" / "collected.safetensors")
        if stamp != self.stamps.get(run.key, 0):  # analysed since
            self.stamps[run.key] = stamp
            self.desk.insights.pop(run.key, None)
        if run.key not in self.desk.insights:
            try:
                found = read_insight(run)
            except (ConfigError, OSError):
                found = None
            if found is None:
                return None
            self.desk.insights[run.key] = found
        return self.desk.insights[run.key]

    async def insight(self, request: "Request") -> "Response":
        seen = await in_thread(self.find_insight, await in_thread(self.find, request))
        return answer_json(None if seen is None else seen.to_dict())

    async def look(self, request: "Request") -> "Response":
        """Let the model read some of its own text, and keep what every expert did."""
        run = await in_thread(self.find, request)

        def work() -> Any:
            with self.desk.alone():
                return self.desk.look(run).to_dict()

        return answer_json(await in_thread(work))

    # --- the model ----------------------------------------------------------------------------------------------

    async def trace(self, request: "Request") -> "Response":
        run, body = await in_thread(self.find, request), await read_body(request, TRACE)
        text, favour = refuse_long(body["text"]), body.get("favour")
        forbid, force = (body.get(name) or [] for name in ("forbid", "force"))
        if any(len(pair) != 2 for pair in (*forbid, *force)):
            raise AskedError(400, "an expert is a layer and a number; send pairs")

        def work() -> Any:
            with self.desk.alone():
                return self.desk.trace(run, text, body.get("checkpoint") or "best", forbid, force, favour)

        return answer_json(await in_thread(work))

    async def generate(self, request: "Request") -> "Response":
        """Text as it comes, a JSON object a line: text, and the experts of its tokens."""
        run, body = await in_thread(self.find, request), await read_body(request, GENERATE)
        prompt, max_tokens = refuse_long(body["prompt"]), body.get("max_tokens")
        options: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": secrets.randbelow(2**31)}
        options |= {name: body[name] for name in options if body.get(name) is not None}
        max_tokens = 200 if max_tokens is None else max_tokens
        if not 1 <= max_tokens <= MOST_NEW_TOKENS:
            raise AskedError(400, f"max_tokens {max_tokens} is out of range; use 1 to {MOST_NEW_TOKENS:,}")
        if not (0 <= options["temperature"] <= 10 and 0 < options["top_p"] <= 1):
            raise AskedError(400, "temperature goes from 0 to 10, top_p from above 0 to 1")
        self.desk.take()  # from here on what fails gives it back
        try:
            opened = await in_thread(self.desk.open, run, body.get("checkpoint") or "best")
            pieces = write(opened, prompt, max_tokens, **options)
            first = await in_thread(next, pieces, None)  # what is refused is refused with a status
        except BaseException:
            self.desk.busy.release()
            raise

        def lines() -> Generator[str, None, None]:
            yield json.dumps({"seed": options["seed"], "step": opened.step}) + "\n"
            if first is not None:
                yield json.dumps({"text": clean(first.text), "experts": first.experts}) + "\n"
                for piece in pieces:
                    yield json.dumps({"text": clean(piece.text), "experts": piece.experts}) + "\n"

        return stream(request, lines(), self.desk.busy.release, "application/x-ndjson")

    async def branches(self, request: "Request") -> "Response":
        """Who serves what in a run that was grown or merged, as far as it was measured."""
        run = await in_thread(self.find, request)
        if run.grown is None:
            raise AskedError(404, f"{run.shown} has no branches")
        grown = run.grown.model_dump()
        kept = {name: clean(grown[name]) for name in ("base", "base_step", "favour", "merged", "kept", "curve")}
        return answer_json(kept | {"parts": run.summary.get("branches", [])})


def event(name: str, value: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'), allow_nan=False)}\n\n"


def read_env(run: Watched) -> dict[str, str]:
    try:
        found = RunFolder(run.path).read_object("env.json") or {}
    except (ConfigError, OSError):
        found = {}
    return {name: str(found[name])[:2_000] for name in ("command", "device", "torch", "commit") if found.get(name)}


def refuse_long(text: str) -> str:
    if len(text) > MOST_TEXT:
        raise AskedError(
            413, f"the text has {len(text):,} characters, more than the {MOST_TEXT:,} read; give a shorter one"
        )
    return text
