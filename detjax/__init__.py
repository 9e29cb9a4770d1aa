"""LLM inference in JAX whose bits do not depend on batch size, slot, neighbours, chunking, caching or phase."""

from detjax import audit as audit
from detjax import models as models
from detjax import ops as ops
from detjax.audit import bisect as bisect
from detjax.audit import certify as certify
from detjax.audit import divergence as divergence
from detjax.audit import trace_digests as trace_digests
from detjax.audit import verify as verify
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
from detjax.invariant import TracedForBatchWarning as TracedForBatchWarning
from detjax.invariant import UnsafeFunction as UnsafeFunction
from detjax.invariant import UnsafeFunctionWarning as UnsafeFunctionWarning
from detjax.invariant import batch_invariant as batch_invariant
from detjax.version import __version__ as __version__
