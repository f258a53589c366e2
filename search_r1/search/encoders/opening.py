"""Opens the model of an encoder: reads what its folder declares and picks who runs it."""

from functools import partial

from search_r1.search.backends.settings import EncoderConfig
from search_r1.search.encoders.declaration import Declaration, read_declaration
from search_r1.search.encoders.families import Family, model_name
from search_r1.search.encoders.interface import Encoder
from search_r1.search.encoders.loading import explained, find_file
from search_r1.search.encoders.transformer import TransformerEncoder
from search_r1.search.errors import SetupError


def open_model(config: EncoderConfig, family: Family, max_length: int | None) -> Encoder:
    """The encoder of a model folder or hub name; raises SetupError with the fix."""
    path = config.retriever_model
    assert path is not None, "the caller names a model"
    flag = "retriever_model"
    declared = explained(flag, path, lambda: read_declaration(partial(find_file, path), family))
    open_it = _open_modules if declared.needs_modules else TransformerEncoder
    encoder: Encoder = explained(
        flag, path, lambda: open_it(model_name(path), declared, config, max_length)
    )
    return encoder


def _open_modules(
    name: str, declared: Declaration, config: EncoderConfig, max_length: int | None
) -> Encoder:
    """sentence-transformers is imported only for the models that need it."""
    try:
        from search_r1.search.encoders.modules import ModulesEncoder  # noqa: PLC0415
    except ImportError as error:
        raise SetupError(
            f"encoder {name} needs sentence-transformers ({error}); "
            "install it: pip install sentence-transformers"
        ) from error
    return ModulesEncoder(name, declared, config, max_length)
