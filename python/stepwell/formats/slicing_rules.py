"""How DeepSpeed's tensor-parallel ranks have cut each parameter, from ``universal_checkpoint_info``
in ``*_model_states.pt``: categories with patterns of names.
"""

from __future__ import annotations

from .name_patterns import NamePatterns
from .tensor_slices import SliceRule
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
        #: The patterns of each category, once they are asked for.
        self._patterns: dict[str, NamePatterns] = {}
        self._with_parts: list[NamePatterns] | None = None

    def _matches(self, key: str, name: str) -> bool:
        """True if a name is of a category."""
        if key not in self._patterns:
            self._patterns[key] = self._category(key, self._fields.get(key))
        return self._patterns[key].match(name)

    def _has_parts(self, name: str) -> bool:
        """True if a parameter is several ones in one."""
        if self._with_parts is None:
            parts = self._fields.get(_PARTS) or []
            if not isinstance(parts, (list, tuple)):
                self._fields.wrong(f"`{_PARTS}` is no list")
            entries = [Fields(self._fields.file, one, f"an entry of `{_PARTS}`") for one in parts]
            self._with_parts = [self._category(_PARTS, one.get("patterns")) for one in entries]
        return any(one.match(name) for one in self._with_parts)

    def _category(self, key: str, value: object) -> NamePatterns:
        patterns = list(value) if isinstance(value, (list, tuple, dict)) else [] if value is None else None
        if patterns is None or not all(isinstance(one, str) for one in patterns):
            self._fields.wrong(f"`{key}` is no list of patterns")
        try:
            return NamePatterns(patterns)
        except ValueError as error:
            self._fields.unread(f"`{key}`: {error}")

    def rows(self, name: str) -> int | None:
        """Returns the rows of a parameter of the vocabulary. More rows are padding. ``None``: all
        rows of the parameter count."""
        if not self._matches(_VOCABULARY, name):
            return None
        found = self._fields.count("original_vocab_size")
        if found is None:
            self._fields.wrong("`original_vocab_size` is no number of rows")
        return found

    def rule(self, name: str, ranks: int) -> SliceRule | str:
        """Returns how so many ranks have cut a parameter, or why it is not read."""
        if ranks == 1:
            return SliceRule(None, rows=self.rows(name))
        if self._matches(_AVERAGED, name):
            return "a parameter that tensor-parallel ranks average"
        if self._matches(_UNSUPPORTED, name) or self._has_parts(name):
            return "a parameter of several parts, in slices"
        rows = self.rows(name)
        if self._matches(_REPLICATED, name):
            return SliceRule(None, rows=rows)
        if self._matches(_TWO_PARTS, name):
            return SliceRule(0, parts=2, rows=rows)
        return SliceRule(1 if self._matches(_ROW, name) else 0, rows=rows)
