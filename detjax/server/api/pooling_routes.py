"""The paths of a server whose model pools, and the ones of a server whose model generates."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from pydantic import BaseModel

from detjax.models.parts.pooling import PoolingOptions
from detjax.server.api.pooling_calls import (
    ClassifyCall,
    EmbeddingCall,
    EncodeCall,
    PoolingCall,
    RerankCall,
    ScoreCall,
)
from detjax.server.api.pooling_fields import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from detjax.server.http.errors import ApiError


class PoolingRoute(NamedTuple):
    """The body and the call of a path."""

    schema: type[BaseModel]
    call: type[PoolingCall]


_SCORE, _RERANK = PoolingRoute(ScoreRequest, ScoreCall), PoolingRoute(RerankRequest, RerankCall)
POOLING_ROUTES: Final[Mapping[str, PoolingRoute]] = {
    "/v1/embeddings": PoolingRoute(EmbeddingRequest, EmbeddingCall),
    "/classify": PoolingRoute(ClassifyRequest, ClassifyCall),
    "/score": _SCORE,
    "/v1/score": _SCORE,
    "/rerank": _RERANK,
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/pooling": PoolingRoute(PoolingRequest, EncodeCall),
}
_GENERATION_PATHS: Final = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


def not_served(options: PoolingOptions | None) -> ApiError:
    """Returns the error of a path that the server's model does not serve, given how it pools, if it does."""
    does, served = "generates", _GENERATION_PATHS
    if options is not None:
        vectors = "/v1/embeddings" if options.gives_embeddings else "/classify"
        pairs = ("/score", "/rerank") if len(options.labels) <= 1 else ()
        does, served = "pools", (vectors, *pairs, "/pooling")
    return ApiError(404, f"the model {does}, so it does not serve this path; accepted: {', '.join(served)}")
