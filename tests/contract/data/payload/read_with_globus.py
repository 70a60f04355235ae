"""Let Globus Compute read buffers that Farcall wrote; see README.md.

Reads a JSON list of ``{"buffer": text, "args": list or null}`` from stdin; writes what came out (the repr of the value,
or of the function's result for these arguments) as a JSON list to stdout.
"""

import json
import sys

from globus_compute_sdk.serialize import ComputeSerializer


def main():
    serializer = ComputeSerializer()
    read = []
    for case in json.load(sys.stdin):
        if "packed" in case:
            read.append(repr([serializer.deserialize(buffer) for buffer in serializer.unpack_buffers(case["packed"])]))
        elif case["args"] is None:
            read.append(repr(serializer.deserialize(case["buffer"])))
        else:
            read.append(repr(serializer.deserialize(case["buffer"])(*case["args"])))
    json.dump(read, sys.stdout)


if __name__ == "__main__":
    main()
