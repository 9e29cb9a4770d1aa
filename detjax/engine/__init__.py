"""Generation: from prompts to tokens and logprobs."""

from detjax.engine.generate import Completion as Completion
from detjax.engine.generate import Generation as Generation
from detjax.engine.generate import generate as generate
from detjax.engine.sampling import SamplingParams as SamplingParams
