"""The command that writes quantized checkpoints."""

from pathlib import Path

from detjax import models
from detjax.cli import main
from detjax.demo import CHECKPOINT
from detjax.models.network import split
from detjax.operands.quantized_weight import is_quantized
from tests.support import commands
from tests.support.one_layer import one_layer


def test_a_checkpoint_is_quantized_once(tmp_path: Path) -> None:
    model, tokenizer = one_layer(CHECKPOINT, seed=0)
    models.save(model, tmp_path / "plain", tokenizer=tokenizer)
    command = ("quantize", tmp_path / "plain", tmp_path / "out", "--to", "int4", "--group-size", "32")
    result = commands.run(main, *command)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{tmp_path / 'out'}: 7 weights in int4, all others as before\n"
    quantized, same = models.load(tmp_path / "out", progress=False)
    assert sum(map(is_quantized, split(quantized)[1])) == 4
    assert same is not None
    assert same.files == tokenizer.files
    again = commands.run(main, *command)
    assert again.exit_code == 2
    assert again.stderr.startswith("error: quantize: ")
    assert again.stderr.endswith("out exists; accepted: a path that does not exist\n")
