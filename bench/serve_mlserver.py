"""MLServer with an ONNX file, for `bench.serve`: run by the Python of MLServer's own virtual environment."""

import asyncio
import socket
import sys
from typing import Any

import onnxruntime
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Onnx(MLModel):
    """The outputs of a file of `afield export`."""

    async def load(self) -> bool:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
        self.names = [output.name for output in self.session.get_outputs()]
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        answers = self.session.run(None, {"input": NumpyCodec.decode_input(payload.inputs[0])})
        outputs = [NumpyCodec.encode_output(name, a) for name, a in zip(self.names, answers, strict=True)]
        return InferenceResponse(model_name=self.name, outputs=outputs)


async def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options: dict[str, Any] = {"parallel_workers": 0, "metrics_endpoint": None, "debug": False, "host": "127.0.0.1"}
    server = MLServer(Settings(http_port=port, grpc_port=0, **options))
    model = ModelSettings(name="m", implementation=Onnx, max_batch_size=64, max_batch_time=0.002)
    asyncio.get_running_loop().call_later(3, lambda: print(f"http://127.0.0.1:{port}/", flush=True))
    await server.start([model])


if __name__ == "__main__":
    asyncio.run(main())
