"""Train a model on verifiable tasks. A restarted run resumes from its last save and ends with the same bytes."""

from typing import Annotated

from detjax.cli.loading import Backend
from detjax.cli.options import Fields, command
from detjax.rl.runs import command as training_command
from detjax.runtime import backends, fingerprints


@command
def train(
    *,
    options: Annotated[
        training_command.TrainingOptions, Fields(training_command.TrainingOptions, positional=("directory",))
    ],
    backend: Backend = None,
) -> None:
    with backends.use_backend(backend):
        backends.check_device()
        digest = training_command.train(options)
    print(f"model {digest}, fingerprint {fingerprints.fingerprint().digest}")
