"""What the README's nginx keeps from the service: huge heads, and heads that never end.

    NGINX=/usr/sbin/nginx python .bench/door.py

nginx runs with the README's own lines, on other ports. A request line of 60 MB, 300 MB
of headers, 300 MB of requests whose answers nobody reads, and 700 half-sent requests go
to the service itself, a fresh one each time, then to nginx. Told are what came back,
how long /health took at most meanwhile, how far the service's memory grew, and how many
of the connections are still open 15 seconds later.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVICE, FRONT = 18201, 18202  # ports
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


def flood(port: int, start: bytes, piece: bytes, pieces: int, seconds: float = 60):
    """Send without reading; return a socket, bytes sent and what stopped it."""
    client = socket.create_connection(("127.0.0.1", port))
    client.settimeout(10)
    sent, deadline = 0, time.monotonic() + seconds
    try:
        client.sendall(start)
        while sent < pieces and time.monotonic() < deadline:
            client.sendall(piece)
            sent += 1
        return client, sent * len(piece), "sent"
    except OSError as error:
        return client, sent * len(piece), type(error).__name__


def request_line(port: int):
    return flood(port, b"GET /", b"a" * 65536, 916)


def headers(port: int):
    return flood(port, HEAD, b"x-h: " + b"a" * 65529 + b"\r\n", 4578)


def pipelined(port: int):
    return flood(port, b"", (HEAD + b"\r\n") * 1000, 7000)


def half_sent(port: int):
    clients = [flood(port, HEAD, b"", 0)[0] for _ in range(700)]
    return clients, 700 * len(HEAD), "sent"


def is_open(client: socket.socket) -> bool:
    client.settimeout(0.01)
    try:
        while client.recv(1 << 16):
            pass
        return False
    except TimeoutError:
        return True
    except OSError:
        return False


def memory_of(process: int) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


def trial(attack, port: int, process: int) -> None:
    slowest, most, done = 0.0, memory_of(process), threading.Event()
    before = most

    def watch() -> None:
        nonlocal slowest, most
        while not done.wait(0.1):
            begun = time.monotonic()
            with suppress(OSError):
                url = f"http://127.0.0.1:{port}/health"
                urllib.request.urlopen(url, timeout=60).read()
            slowest = max(slowest, time.monotonic() - begun)
            most = max(most, memory_of(process))

    watcher = threading.Thread(target=watch)
    watcher.start()
    clients, sent, how = attack(port)
    time.sleep(15)
    clients = clients if isinstance(clients, list) else [clients]
    still = sum(map(is_open, clients))
    done.set()
    watcher.join()
    print(
        f"{attack.__name__:>13} {sent / 1e6:8.1f} MB {how:>20}, /health {slowest:5.2f} s,"
        f" memory +{most - before:.0f} MB, open {still} of {len(clients)}",
        flush=True,
    )


def wait_for(port: int) -> None:
    for _ in range(300):
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.1)
    raise SystemExit(f"nothing listens on port {port}")


def main() -> None:
    page = (ROOT / "README.md").read_text()
    [lines] = re.findall(r"```nginx\n(.*?)```", page, re.DOTALL)
    lines = lines.replace("listen 80", f"listen {FRONT}")
    lines = lines.replace("127.0.0.1:8000", f"127.0.0.1:{SERVICE}")
    with tempfile.TemporaryDirectory() as folder:
        bodies = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        paths = " ".join(f"{n}_temp_path {folder}/{n};" for n in bodies)
        config = Path(folder) / "nginx.conf"
        config.write_text(
            f"daemon off; pid {folder}/pid; error_log {folder}/errors;"
            f"events {{ worker_connections 1024; }} http {{ access_log off; {paths}\n{lines}}}"
        )
        nginx = [os.environ.get("NGINX", "nginx"), "-c", str(config)]
        uvicorn = [sys.executable, "-m", "uvicorn", "main:app", "--no-access-log"]
        uvicorn += ["--port", str(SERVICE), "--log-level", "error", "--http", "h11"]
        environment = os.environ | {"DATA_DIR": f"{folder}/data", "API_KEY": "key"}
        with subprocess.Popen(nginx, stderr=subprocess.DEVNULL) as front:
            try:
                for attack in (request_line, headers, pipelined, half_sent):
                    for port in (SERVICE, FRONT):
                        with subprocess.Popen(
                            uvicorn, cwd=ROOT, env=environment
                        ) as service:
                            wait_for(SERVICE)
                            wait_for(FRONT)
                            print("nginx  " if port == FRONT else "service", end=" ")
                            trial(attack, port, service.pid)
                            service.kill()
            finally:
                front.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
