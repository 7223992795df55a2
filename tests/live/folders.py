"""Run folders as training leaves them, made in milliseconds, to grow and to be damaged; and the server, in a thread."""

import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from some_moe.config import RunConfig
from some_moe.live.server import bind, make_page, make_server
from some_moe.live.watched import Watch


def share(limit: float) -> float:
    """A limit of time for a machine that does nothing else: longer by as many as want each core at the moment."""
    return limit * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


TOKEN = "a-token-that-only-the-page-knows"


def make_run(path: Path, *, name: str = "run", layers: int = 2, experts: int = 6, width: int = 8, steps: int = 20,
             snapshots: Sequence[int] = (0, 10, 20), **settings: Any) -> Path:  # fmt: skip
    """A run that logged `steps` steps and is still training."""
    path.mkdir(parents=True)
    sizes = {"num_layers": layers, "num_experts": experts, "d_model": width, "num_heads": 2, "vocab_size": 64}
    changes = {f"model.{field}": value for field, value in sizes.items()}
    changes |= {"name": name, "data.train_subset_size": 800, "data.batch_size": 8, "train.epochs": 1, "model.top_k": 2}
    (path / "config.yaml").write_text(RunConfig().override(changes | settings).to_yaml(), encoding="utf-8")
    write_steps(path, range(1, steps + 1))
    write_evaluation(path, steps, layers)
    for number, step in enumerate(snapshots):
        write_keys(path, step, layers, experts, width, shift=0.1 * number)
    return path


def step_line(step: int, loss: float | None = None) -> str:
    about = {"step": step, "epoch": 1, "tokens": 100 * step, "train_loss": 5 - step / 100 if loss is None else loss}
    about |= {"gradient_norm": 1.0, "learning_rate": 0.01, "top_k": 2, "gini_middle": 0.4, "tokens_per_second": 1000.0}
    return json.dumps(about) + "\n"


def write_steps(path: Path, steps: Iterator[int] | range) -> None:
    append(path, "metrics.jsonl", "".join(map(step_line, steps)))


def evaluation_line(step: int, layers: int, loss: float = 4.5) -> str:
    usage = {"gini": 0.5, "entropy_bits": 2.0, "max_entropy_bits": 2.6, "experts_used": 5, "num_experts": 6}
    by_layer = [{"layer": n, "max_load": 2.0, "respawns": n} | usage for n in range(layers)]
    return json.dumps({"step": step, "tokens": 100 * step, "val_loss": loss, "perplexity": 90.0, "bits_per_byte": 1.2,
                       "layers": by_layer}) + "\n"  # fmt: skip


def write_evaluation(path: Path, step: int, layers: int, loss: float = 4.5) -> None:
    append(path, "metrics.jsonl", evaluation_line(step, layers, loss))


def write_keys(path: Path, step: int, layers: int, experts: int, width: int, *, shift: float = 0.0) -> None:
    random = np.random.default_rng(0)
    tensors = {}
    for layer in range(layers):
        keys = random.standard_normal((experts, width)).astype(np.float32) + shift
        tensors[f"{layer}.keys"] = keys / np.linalg.norm(keys, axis=1, keepdims=True)
        tensors[f"{layer}.usage"] = np.linspace(0.1, 2, experts).astype(np.float32)
    (path / "keys").mkdir(exist_ok=True)
    save_file(tensors, path / "keys" / f"step-{step}.safetensors")


def append(path: Path, log: str, text: str) -> None:
    with (path / log).open("a", encoding="utf-8") as file:
        file.write(text)


class Served:
    """A server on this machine, and a client that speaks to it as the page does unless told otherwise."""

    def __init__(self, port: int) -> None:
        self.port = port

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def page(self) -> str:
        return f"{self.address}/#{TOKEN}"

    def ask(self, path: str, body: Any = None, *, method: str | None = None, raw: bytes | None = None,
            **headers: str | None) -> tuple[int, Any]:  # fmt: skip
        """Status and JSON (or bytes) of an answer. headers: x_some_token=…; None leaves one out."""
        sent: dict[str, str | None] = {"x-some-token": TOKEN}
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        if data is not None:
            sent["content-type"] = "application/json"
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            method = method or ("GET" if data is None else "POST")
            connection.putrequest(method, path, skip_host="host" in sent, skip_accept_encoding=True)
            sized = {"content-length": str(len(data))} if data is not None and "content-length" not in sent else {}
            for name, value in (sized | sent).items():
                if value is not None:
                    connection.putheader(name, value)
            connection.endheaders()
            if data is not None:
                connection.send(data)
            answer = connection.getresponse()
            found = answer.read()
        finally:
            connection.close()
        is_json = answer.headers.get_content_type() == "application/json"
        return answer.status, json.loads(found) if is_json and found else found

    def leave(self, path: str, body: Any, seconds: float) -> None:
        """Ask, and be gone after a moment, whatever is being answered."""
        data = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}", f"x-some-token: {TOKEN}"]
        lines += ["content-type: application/json", f"content-length: {len(data)}", "", ""]
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            client.sendall("\r\n".join(lines).encode() + data)
            threading.Event().wait(seconds)

    def events(self, path: str) -> Iterator[tuple[str, Any]]:
        """Name and data of server-sent events, for as long as they are asked for."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", path, headers={"x-some-token": TOKEN})
        answer, name = connection.getresponse(), ""
        assert answer.status == 200
        try:
            while True:
                line = answer.readline().decode().rstrip("\n")
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield name, json.loads(line.removeprefix("data: "))
        finally:
            connection.close()


@contextmanager
def serving(app_of: Any) -> Iterator[Served]:
    """app_of: makes the application of a port."""
    listening = bind("127.0.0.1", 0)
    port = listening.getsockname()[1]
    server = make_server(app_of(port))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield Served(port)
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()


@contextmanager
def watching(*places: Path) -> Iterator[Served]:
    with serving(lambda port: make_page(Watch(places), port=port, token=TOKEN)) as served:
        yield served
