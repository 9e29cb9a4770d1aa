"""Generation: from prompts to tokens and logprobs.

The modules are read from the bottom up: `request` and `sampling_params`, then `page_pool`, `scheduler`, `batch`,
`slot_table`, `packed_batch`, `step_programs` and `model_runner`, then `step_loop`, `engine_thread` and `engine`.
`generate` is the same loop without a thread.
"""

from detjax.engine.batch import BatchShapes as BatchShapes
from detjax.engine.config import EngineConfig as EngineConfig
from detjax.engine.config import EngineStats as EngineStats
from detjax.engine.constraint import Constraint as Constraint
from detjax.engine.drafts.speculative_config import SpeculativeConfig as SpeculativeConfig
from detjax.engine.engine import Engine as Engine
from detjax.engine.engine_thread import EngineClosed as EngineClosed
from detjax.engine.field_error import FieldError as FieldError
from detjax.engine.generate import generate as generate
from detjax.engine.pooled_texts import classify as classify
from detjax.engine.pooled_texts import embed as embed
from detjax.engine.pooled_texts import score as score
from detjax.engine.pooling import Pooling as Pooling
from detjax.engine.program_cache import prepare_cache as prepare_cache
from detjax.engine.program_compiler import Compilers as Compilers
from detjax.engine.reasoning_budget import ReasoningBudget as ReasoningBudget
from detjax.engine.reasoning_budget import ReasoningMarks as ReasoningMarks
from detjax.engine.request import Aborted as Aborted
from detjax.engine.request import Completion as Completion
from detjax.engine.request import Generation as Generation
from detjax.engine.request import NotFinite as NotFinite
from detjax.engine.request import PromptLogprobs as PromptLogprobs
from detjax.engine.request import Request as Request
from detjax.engine.request import Token as Token
from detjax.engine.sampling_params import SamplingParams as SamplingParams
from detjax.engine.sampling_variant import SamplingVariant as SamplingVariant
from detjax.engine.sequence import Sequence as Sequence
from detjax.engine.step_loop import StepLoop as StepLoop
from detjax.engine.step_loop import StepLoopConfig as StepLoopConfig
