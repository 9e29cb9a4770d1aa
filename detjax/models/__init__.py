"""Decoder-only language models, and their import from and export to Hugging Face checkpoints."""

from detjax.models.cache import KVCache as KVCache
from detjax.models.checkpoint import load as load
from detjax.models.checkpoint import save as save
from detjax.models.config import DecoderConfig as DecoderConfig
from detjax.models.decoder import Decoder as Decoder
from detjax.models.digest import digest as digest
from detjax.models.generation_defaults import GenerationDefaults as GenerationDefaults
from detjax.models.json_object import CheckpointError as CheckpointError
from detjax.models.mesh import mesh_of as mesh_of
from detjax.models.mesh import sharded as sharded
from detjax.models.outline import ModelOutline as ModelOutline
from detjax.models.tokenizer import Tokenizer as Tokenizer
from detjax.models.videos import Video as Video
