"""LLM inference in JAX whose bits do not depend on batch size, slot, neighbours, chunking, caching or phase."""

from detjax import models as models
from detjax import ops as ops
from detjax.contract import CONTRACT_VERSION as CONTRACT_VERSION
from detjax.engine import Completion as Completion
from detjax.engine import Engine as Engine
from detjax.engine import Generation as Generation
from detjax.engine import Request as Request
from detjax.engine import SamplingParams as SamplingParams
from detjax.engine import generate as generate
from detjax.platform import EnvironmentContradiction as EnvironmentContradiction
from detjax.platform import backend as backend
from detjax.platform import fingerprint as fingerprint
from detjax.platform import jit as jit
from detjax.platform import use_backend as use_backend
from detjax.version import __version__ as __version__
