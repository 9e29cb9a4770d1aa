"""Decoder-only language models, and their import from and export to Hugging Face checkpoints.

Read `decoder` first, then a family in `families`, then `parts`, which families are composed of. `configuration` and
`checkpoint` read and write files; `mesh` shares weights among devices; `drafts` are heads that guess tokens.
"""

from detjax.models import families as families
from detjax.models.adapters.adapted_model import adapter_of as adapter_of
from detjax.models.adapters.adapted_model import merged as merged
from detjax.models.adapters.adapted_model import new_adapter as new_adapter
from detjax.models.adapters.adapted_model import with_adapter as with_adapter
from detjax.models.adapters.adapter import Adapter as Adapter
from detjax.models.adapters.adapter import read_adapter as read_adapter
from detjax.models.adapters.adapter import save_adapter as save_adapter
from detjax.models.adapters.adapter_config import AdapterConfig as AdapterConfig
from detjax.models.adapters.loading import load as load
from detjax.models.cache import KVCache as KVCache
from detjax.models.checkpoint.digest import digest as digest
from detjax.models.checkpoint.metadata import ModelMetadata as ModelMetadata
from detjax.models.checkpoint.saving import save as save
from detjax.models.configuration.config import DecoderConfig as DecoderConfig
from detjax.models.configuration.generation_defaults import GenerationDefaults as GenerationDefaults
from detjax.models.configuration.json_object import CheckpointError as CheckpointError
from detjax.models.decoder import Decoder as Decoder
from detjax.models.drafts.draft import Draft as Draft
from detjax.models.drafts.loading import load_draft as load_draft
from detjax.models.mesh import mesh_of as mesh_of
from detjax.models.mesh import sharded as sharded
from detjax.models.text.tokenizer import Tokenizer as Tokenizer
from detjax.models.vision.videos import Video as Video
