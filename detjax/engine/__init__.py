"""Generation: from prompts to tokens and logprobs."""

from detjax.engine.engine import Engine as Engine
from detjax.engine.engine import EngineClosed as EngineClosed
from detjax.engine.generate import generate as generate
from detjax.engine.request import Completion as Completion
from detjax.engine.request import Generation as Generation
from detjax.engine.request import PromptLogprobs as PromptLogprobs
from detjax.engine.request import Request as Request
from detjax.engine.request import Token as Token
from detjax.engine.sampling import SamplingParams as SamplingParams
