"""How DeepSpeed's tensor-parallel ranks have cut each parameter, from ``universal_checkpoint_info``
in the states of the model: categories with patterns of names.
"""

from __future__ import annotations

from .name_patterns import NamePatterns
from .tensor_slices import Cut
from .typed_fields import Fields

KEY = "universal_checkpoint_info"
_REPLICATED = "tp_replicated_parameter_patterns"
_ROW = "parameter_with_row_parallelism_patterns"
_VOCABULARY = "vocabulary_parameter_patterns"
_TWO_PARTS = "parameter_with_2_sub_params_cat_dim_0"
_AVERAGED = "parameter_to_average_patterns"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_PARTS = "parameter_with_sub_params"


class SlicingRules:
    """The categories of a save."""

    def __init__(self, model: Fields) -> None:
        if not model.has(KEY):
            model.unread(
                f"tensor-parallel ranks are read if `{KEY}` says how they cut each parameter, and it is not there. "
                "Save with one tensor-parallel rank, or with a version of DeepSpeed that writes it"
            )
        self._fields = model.fields(KEY)
        self._patterns = {
            key: self._category(key, self._fields.get(key))
            for key in (_REPLICATED, _ROW, _VOCABULARY, _TWO_PARTS, _AVERAGED, _UNSUPPORTED)
        }
        parts = self._fields.get(_PARTS) or []
        if not isinstance(parts, (list, tuple)):
            self._fields.wrong(f"`{_PARTS}` is no list")
        self._with_parts = [
            self._category(_PARTS, Fields(model.file, one, f"an entry of `{_PARTS}`").get("patterns"))
            for one in parts
        ]
        self._rows = self._fields.count("original_vocab_size")

    def _category(self, key: str, value: object) -> NamePatterns:
        patterns = list(value) if isinstance(value, (list, tuple, dict)) else [] if value is None else None
        if patterns is None or not all(isinstance(one, str) for one in patterns):
            self._fields.wrong(f"`{key}` is no list of patterns")
        try:
            return NamePatterns(patterns)
        except ValueError as error:
            self._fields.unread(f"`{key}`: {error}")

    def cut(self, name: str) -> Cut | str:
        """Returns how a parameter is cut, or why it is not read."""
        if self._patterns[_AVERAGED].match(name):
            return "a parameter that tensor-parallel ranks average"
        if self._patterns[_UNSUPPORTED].match(name) or any(one.match(name) for one in self._with_parts):
            return "a parameter of several parts, in slices"
        rows = None
        if self._patterns[_VOCABULARY].match(name):
            if self._rows is None:
                self._fields.wrong("`original_vocab_size` is no number of rows")
            rows = self._rows
        if self._patterns[_REPLICATED].match(name):
            return Cut(None, rows=rows)
        if self._patterns[_TWO_PARTS].match(name):
            return Cut(0, parts=2, rows=rows)
        return Cut(1 if self._patterns[_ROW].match(name) else 0, rows=rows)
