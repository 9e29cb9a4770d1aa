"""Print everything that bits depend on, except the request and the weights, as JSON."""

import dataclasses
import json
from typing import Any

from detjax.cli.loading import Backend
from detjax.cli.options import command
from detjax.runtime import backends, fingerprints


@command
def fingerprint(*, backend: Backend = None) -> None:
    with backends.use_backend(backend):
        print(json.dumps(as_json(fingerprints.fingerprint()), indent=2))


def as_json(fingerprint: fingerprints.Fingerprint) -> dict[str, Any]:
    """Returns the fields of a fingerprint, with its digest."""
    return dataclasses.asdict(fingerprint) | {"digest": fingerprint.digest}
