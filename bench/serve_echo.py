"""The floor of `bench.serve`: the server of the service, with an application that sends the same to everybody."""

import socket
from typing import Any

import uvicorn

from afield.serve.server import Protocol

ANSWER = (
    b'{"model_name":"m","model_version":"0","outputs":[' + b'{"name":"x","shape":[1],"data":[0.12345678]},' * 6 + b"]}"
)
HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]


async def app(scope: Any, receive: Any, send: Any) -> None:
    while scope["type"] == "lifespan":
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"].endswith("shutdown"):
            return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": ANSWER})


if __name__ == "__main__":
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(2048)
        print(f"http://127.0.0.1:{listening.getsockname()[1]}/", flush=True)
        config = uvicorn.Config(app, http=Protocol, log_config=None, access_log=False, date_header=False)
        uvicorn.Server(config).run(sockets=[listening])
