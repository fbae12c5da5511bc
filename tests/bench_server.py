"""The capture server over connections, beside vLLM's own OpenAI server on the same scripted work. Run by `bench.py server`.

Three servers, each in a process of its own, on one core: instar's; vLLM's FastAPI app with all that is its own but the engine;
and an app that reads the body and answers at once, which shows what uvicorn, the socket and the client cost. All have uvicorn,
httptools and uvloop, as in a Runner and under `vllm serve`. The client has another core: raw HTTP over connections that stay
open, bodies made before. Sessions of 4 and 8 turns, no two of the same words, resend their whole history. The servers take turns
in every round; a number is the median over the rounds, a ratio that of the rounds' ratios. Where other work shares the cores,
cpu_ms is what to trust: the scheduler gives more of a core to vLLM's threads than to one.
"""

import asyncio
import json
import multiprocessing
import operator
import os
import socket
import statistics
import time

SAID = "a reply of some words, as agents say them"
LOADS = {  # name -> concurrent sessions, sessions of a round, streamed, how long a question is
    "1": (1, 16, False, 1),
    "16": (16, 96, False, 1),
    "256": (256, 512, False, 1),
    "stream_1": (1, 16, True, 1),
    "stream_16": (16, 96, True, 1),
    "stream_256": (256, 512, True, 1),
    "long_16": (16, 48, False, 100),  # 2 kB: what a tool gives back
}
ROUNDS, SECONDS = 7, 120  # at most so many rounds, and none begun later: a busy machine gets fewer
SERVERS = {"instar": "", "vllm": "vllm_", "echo": "echo_"}  # and how their numbers are named


# ---- The servers


def serve(kind: str, pipe, core: int) -> None:
    os.sched_setaffinity(0, {core})
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    os.environ["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = (
        "600"  # as instar's: connections wait while the others have their turn
    )
    import uvloop

    uvloop.run({"echo": echo, "instar": instar, "vllm": vllm}[kind](pipe))


def attend(pipe, port: int, opened, closed) -> None:
    """Tell the port, then obey: open sessions and tell their paths, close them, tell the CPU seconds spent so far."""

    def obey():
        try:
            name, *args = pipe.recv()
        except EOFError:  # the client is gone
            os._exit(0)
        pipe.send({"open": opened, "close": closed, "cpu": time.process_time}[name](*args))

    pipe.send(port)
    asyncio.get_running_loop().add_reader(pipe.fileno(), obey)


async def echo(pipe) -> None:
    import uvicorn

    reply = json.dumps(
        {"choices": [{"index": 0, "message": {"role": "assistant", "content": SAID}}]}
    ).encode()

    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(reply)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": reply})

    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    attend(pipe, listener.getsockname()[1], lambda n: ["/"] * n, lambda turns: None)
    config = uvicorn.Config(
        app, log_level="critical", access_log=False, lifespan="off", timeout_keep_alive=600
    )
    await uvicorn.Server(config).serve(sockets=[listener])


async def instar(pipe) -> None:
    import numpy as np
    from transformers import AutoTokenizer

    from agent import Reply, Result
    from server import Chat, Forest, Server

    chat, app = Chat(AutoTokenizer.from_pretrained("examples/starter")), Server("policy")
    said = np.asarray([*chat.encode(SAID), chat.tokenizer.eos_token_id], np.int32)

    async def generate(ids, max_tokens, known, stop, grammar):
        return Reply(
            said, np.zeros(len(said), np.float32), np.zeros(len(said), np.int32), b"", "stop"
        )

    def opened(n):
        forests = [
            Forest(chat, generate, lambda text, tools: (None, text, []), 99, 10**6, {})
            for _ in range(n)
        ]
        return [f"/r/{app.open(forest)}/v1/chat/completions" for forest in forests]

    def closed(turns):
        for forest, n in zip(app.forests.values(), turns):
            (row,) = forest.segments(Result(), 0, 0)
            assert len(row.replies) == n, "a session is one row with all its replies"
        app.forests.clear()

    app.start()
    attend(pipe, app.port, opened, closed)
    await app.task


async def vllm(pipe) -> None:
    """What `vllm serve` does after it has built its engine."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.protocol import EngineClient
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.renderers import renderer_from_config
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.input_processor import InputProcessor

    flags = [
        "--model",
        "examples/starter",
        "--served-model-name",
        "policy",
        "--max-model-len",
        "65536",
    ]
    flags += [
        "--host",
        "127.0.0.1",
        "--disable-uvicorn-access-log",
        "--uvicorn-log-level",
        "critical",
    ]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    validate_parsed_serve_args(args)

    class Engine(EngineClient):
        is_running, is_stopped, errored, dead_error = True, False, False, None

        def __init__(self):
            self.vllm_config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
            self.model_config = self.vllm_config.model_config
            self.renderer = renderer_from_config(self.vllm_config)
            self.input_processor = InputProcessor(self.vllm_config, self.renderer)
            self.tokenizer = self.renderer.tokenizer
            self.said = [
                *self.tokenizer.encode(SAID, add_special_tokens=False),
                self.tokenizer.eos_token_id,
            ]

        async def generate(self, prompt, sampling_params, request_id, **_):
            text = self.tokenizer.decode(self.said, skip_special_tokens=True)
            out = CompletionOutput(0, text, self.said, None, None, finish_reason="stop")
            yield RequestOutput(request_id, None, prompt["prompt_token_ids"], None, [out], True)

        async def get_supported_tasks(self):
            return ("generate",)

        async def is_tracing_enabled(self):
            return False

        async def do_log_stats(self):
            pass

        async def check_health(self):
            pass

    Engine.__abstractmethods__ = frozenset()  # what no chat request asks for
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    args.port = listener.getsockname()[1]
    attend(pipe, args.port, lambda n: ["/v1/chat/completions"] * n, lambda turns: None)
    await (await build_and_serve(Engine(), "", listener, args))


# ---- The client


async def request(connection, path: str, body: bytes) -> bytes:
    reader, writer = connection
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    if (at := head.find(b"content-length: ")) >= 0:
        return await reader.readexactly(int(head[at + 16 : head.index(b"\r", at)]))
    return await reader.readuntil(b"\r\n0\r\n\r\n")  # chunked: a stream


def bodies(session: int, turns: int, stream: bool, length: int) -> list[bytes]:
    """The requests of a session: known before, since the replies are."""
    messages, made = [], []
    for i in range(turns):
        text = f"question {i} of session {session}" + ", with a few words more" * length
        messages.append({"role": "user", "content": text})
        made.append(
            json.dumps({"model": "policy", "messages": messages, "stream": stream}).encode()
        )
        messages.append({"role": "assistant", "content": SAID})
    return made


class Target:
    """A server's process, and the connections to it."""

    def __init__(self, kind: str, core: int):
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=serve, args=(kind, there, core), daemon=True)
        self.process.start()
        there.close()  # so that a process that dies is noticed
        self.connections, self.sessions = [], 0

    def ask(self, *command):
        self.pipe.send(command)
        return self.pipe.recv()

    async def connect(self, n: int) -> None:
        port = self.pipe.recv()
        self.connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(n)]

    def session(self, path: str, *shape) -> tuple[str, list[bytes]]:
        self.sessions += 1  # the same words on every server
        return path, bodies(self.sessions, *shape)

    async def talk(self, turns: int) -> tuple[list[float], list[bytes]]:
        """(seconds, reply) of the turns of one session."""
        path, session = self.session(*self.ask("open", 1), turns, False, 1)
        seconds, replies = [], []
        for body in session:
            begun = time.perf_counter()
            replies.append(await request(self.connections[0], path, body))
            seconds.append(time.perf_counter() - begun)
        self.ask("close", [turns])
        return seconds, replies

    async def load(self, concurrent: int, sessions: int, stream: bool, length: int) -> dict:
        turns, seconds = [4, 8] * (sessions // 2), []
        paths = self.ask("open", sessions)
        waiting = [self.session(path, n, stream, length) for path, n in zip(paths, turns)][::-1]

        async def work(connection):
            while waiting:
                path, session = waiting.pop()
                for body in session:
                    begun = time.perf_counter()
                    await request(connection, path, body)
                    seconds.append(time.perf_counter() - begun)

        cpu, own, begun = self.ask("cpu"), time.process_time(), time.perf_counter()
        await asyncio.gather(*[work(c) for c in self.connections[:concurrent]])
        wall, own, cpu = (
            time.perf_counter() - begun,
            time.process_time() - own,
            self.ask("cpu") - cpu,
        )
        self.ask("close", turns)
        seconds.sort()
        return {
            "requests_per_second": len(seconds) / wall,
            "latency_ms": 1e3 * seconds[len(seconds) // 2],
            "p99_ms": 1e3 * seconds[len(seconds) * 99 // 100],
            "cpu_ms": 1e3 * cpu / len(seconds),  # of the server, for one request
            "client_busy": own / wall,
        }


def compared(rounds: list[dict], name: str) -> dict:
    """Medians over rounds, each the numbers of every server."""

    def median(key: str, kind: str, other: str = "", of=lambda a, b: a) -> float:
        return statistics.median(of(r[kind][key], r[other or kind][key]) for r in rounds)

    out = {
        f"{prefix}{key}_{name}": median(key, kind)
        for kind, prefix in SERVERS.items()
        for key in ("requests_per_second", "latency_ms", "p99_ms", "cpu_ms")
    }
    for kind in ("instar", "vllm"):  # behind what a server costs that does nothing
        for key, added in (("latency_ms", "added_ms"), ("p99_ms", "added_p99_ms")):
            out[f"{SERVERS[kind]}{added}_{name}"] = median(key, kind, "echo", operator.sub)
    for key, ratio in (
        ("requests_per_second", "ratio"),
        ("cpu_ms", "cpu_ratio"),
        ("p99_ms", "p99_ratio"),
    ):
        out[f"{ratio}_{name}"] = median(key, "instar", "vllm", operator.truediv)
    out[f"client_busy_{name}"] = median("client_busy", "instar")
    return out


async def measure(targets: dict[str, Target]) -> dict:
    for target in targets.values():
        await target.connect(max(concurrent for concurrent, *_ in LOADS.values()))
    work = []
    for kind in ("instar", "vllm"):
        replies = [json.loads(r) for r in (await targets[kind].talk(8))[1]]
        tokens = [(r["usage"]["prompt_tokens"], r["usage"]["completion_tokens"]) for r in replies]
        work.append((tokens, [r["choices"][0]["message"]["content"] for r in replies]))
    assert work[0] == work[1] and set(work[0][1]) == {SAID}, "both do the same work"
    rounds, orders, found, begun = (
        {name: [] for name in LOADS},
        list(SERVERS),
        {},
        time.perf_counter(),
    )
    for i in range(ROUNDS + 1):
        if i > 1 and time.perf_counter() - begun > SECONDS:
            break
        orders = orders[1:] + orders[:1]
        for name, load in LOADS.items():
            rounds[name].append({kind: await targets[kind].load(*load) for kind in orders})
    for name in LOADS:
        found |= compared(rounds[name][1:], name)  # the first warms up
    talks = [{kind: (await targets[kind].talk(130))[0] for kind in SERVERS} for _ in range(ROUNDS)]
    for kind, prefix in SERVERS.items():
        for turn in (2, 128):
            seconds = [s for talk in talks for s in talk[kind][turn - 1 : turn + 1]]
            found[f"{prefix}http_turn_{turn}_ms"] = 1e3 * statistics.median(seconds)
    return found


def connections() -> dict:
    import uvloop

    cores = sorted(os.sched_getaffinity(0))
    targets = {kind: Target(kind, cores[0]) for kind in SERVERS}
    os.sched_setaffinity(0, {cores[-1]})
    try:
        return uvloop.run(measure(targets))
    finally:
        os.sched_setaffinity(0, cores)
        for target in targets.values():
            target.process.kill()
