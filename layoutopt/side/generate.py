"""Make ``side_pb2.py`` and ``side_pb2.pyi`` of ``side.proto``: ``python -m layoutopt.side.generate [FOLDER]``.

Needs grpcio-tools (the extra ``dev``). The results are committed; a test makes them again and compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

from layoutopt.errors import LayoutOptError
from layoutopt.side.needs import need

__all__ = ["generate"]

HERE = Path(__file__).resolve().parent


def generate(folder: Path = HERE) -> None:
    """Write both files.

    Args:
        folder: where; beside the ``.proto`` file by default.

    Raises:
        LayoutOptError: grpcio-tools is missing, or the ``.proto`` file is wrong.
    """
    protoc = need("grpc_tools.protoc", "generating messages", "dev")
    code = protoc.main(["protoc", f"-I{HERE}", f"--python_out={folder}", f"--pyi_out={folder}", "side.proto"])
    if code:
        raise LayoutOptError(f"protoc refused {HERE / 'side.proto'} (exit code {code}): see its messages above")


if __name__ == "__main__":
    generate(*(Path(word) for word in sys.argv[1:2]))
