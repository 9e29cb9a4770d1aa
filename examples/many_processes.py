"""One model sharded over two processes, with the bits of one device.

python examples/many_processes.py 0 & python examples/many_processes.py 1

Each process simulates two devices on a CPU. On several machines, pass the machine's number as first argument and the
address of machine 0 as second, such as 10.0.0.1:9123.
"""

import os
import sys

PROCESSES = 2
process, coordinator = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "localhost:9123"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax  # noqa: E402  it reads the variable above

jax.distributed.initialize(coordinator, num_processes=PROCESSES, process_id=process)

import detjax  # noqa: E402
from detjax.demo import CHECKPOINT  # noqa: E402

mesh = detjax.models.mesh_of(jax.device_count())
shared, tokenizer = detjax.models.load(CHECKPOINT, mesh=mesh, progress=False)
params = detjax.SamplingParams(max_tokens=8, temperature=0.8, seed=7)

# Every process makes the same calls in the same order.
(answer,) = detjax.generate(shared, ["ROMEO:"], params, tokenizer=tokenizer)
if process == 0:
    alone, _ = detjax.models.load(CHECKPOINT, progress=False)
    expected = detjax.generate(alone, ["ROMEO:"], params, tokenizer=tokenizer)
    print(f"{jax.device_count()} devices of {PROCESSES} processes: {answer.completions[0].text!r}")
    print("the bits of one device:", answer == expected[0])
jax.distributed.shutdown()
