"""LLM inference in JAX whose bits do not depend on batch size, slot, neighbours, chunking, caching or phase."""

from detjax import models as models
from detjax import ops as ops
from detjax.backends import backend as backend
from detjax.backends import use_backend as use_backend
from detjax.compilation import EnvironmentContradiction as EnvironmentContradiction
from detjax.compilation import jit as jit
from detjax.contract import CONTRACT_VERSION as CONTRACT_VERSION
from detjax.engine import Completion as Completion
from detjax.engine import Engine as Engine
from detjax.engine import EngineConfig as EngineConfig
from detjax.engine import Generation as Generation
from detjax.engine import Request as Request
from detjax.engine import SamplingParams as SamplingParams
from detjax.engine import generate as generate
from detjax.fingerprints import fingerprint as fingerprint
from detjax.version import __version__ as __version__
