"""Why something is served plainly. Clients, counters and events see these words: a changed one is a
change of the API.

A word stands where it says most; ``not_in_prompt`` is said of a skill and of a field, and
``internal_error`` and ``exact`` of whatever they concern.
"""

from __future__ import annotations

import enum


class Reason(str, enum.Enum):
    """A word for why; its value is what clients see."""

    # of a skill, or of a span of it
    DIFFERS_AT = "differs_at"  # the prompt leaves the skill's text before it ends
    TOO_SHORT = "too_short"  # too few tokens behind the seam, or to be recognised at all
    SEAM_TOO_LONG = "seam_too_long"  # the request's seam is longer than the skill
    NOT_WORTH_A_PASS = "not_worth_a_pass"  # the run saves less than its forced boundary costs
    TOO_MANY_RUNS = "too_many_runs"  # longer runs have used up the request's forced boundaries
    COMPILING = "compiling"  # its KV is not there yet
    EVICTED = "evicted"  # its KV, or that of an earlier turn, is no longer cached
    RETIRED = "retired"  # replaced, deleted or purged
    FAILED = "failed"  # its compile did not finish
    UNKNOWN_SKILL = "unknown_skill"  # the request names a skill that its namespace does not have
    NOT_IN_PROMPT = "not_in_prompt"  # the skill or field was looked for and not found
    NO_SLOTS = "no_slots"  # the pool has no room for the copy
    OVERTAKEN = "overtaken"  # another request spliced a part of the same run
    WINDOW_LOST = "window_lost"  # the donor's slots in a window pool are gone
    INTERNAL_ERROR = "internal_error"  # a hook broke; the server's log has the traceback

    # of a field: why it takes no part in edits
    ROLE_NOT_FOUND = "role_not_found"  # no such message, or no chat form to find it by
    VALUE_EMPTY = "value_empty"  # nothing but spaces
    VALUE_TOO_LONG = "value_too_long"  # in tokens or in characters
    VALUE_MARKUP = "value_markup"  # it could pass for something else than a value
    VALUE_OPEN = "value_open"  # the text that ends a value does not come
    TOKENS_MERGE = "tokens_merge"  # the value has no token edges that every value would have
    OVERLAPPING = "overlapping"  # its window and another field's share tokens
    ANCHOR_NOT_FOUND = "anchor_not_found"  # there is no place for a line
    OTHER_ANCHOR = "other_anchor"  # an earlier field of the prompt wants its lines elsewhere
    BEHIND_ANCHOR = "behind_anchor"  # its window ends behind the place of the lines

    # of a prompt with fields: why it is served as it was sent
    NO_FIELD = "no_field"  # no field of it can be edited
    STRATEGY = "strategy"  # no strategy in force may build on what there is
    NOT_PROVEN = "not_proven"  # nothing is proven to be the caller's, remembered or not
    NO_BASE = "no_base"  # the caller is proven, and has no such turn
    NO_SAVING = "no_saving"  # there are turns of the caller's own, and none saves tokens
    OFF = "off"  # the request wants no edits

    # of a whole request: it wants exact KV, needs all of its prompt computed, or KV that depends
    # on more than token ids
    EXACT = "exact"  # it asks for exact KV, or scores its prompt
    SESSION = "session"
    INPUT_EMBEDS = "input_embeds"
    POSITIONAL_EMBED_OVERRIDES = "positional_embed_overrides"
    TOKEN_TYPE_IDS = "token_type_ids"
    MULTIMODAL = "multimodal"
    MULTI_ITEM = "multi_item"
    TOKEN_INDICES_TO_POOL = "token_indices_to_pool"
    ROUTED_EXPERTS = "routed_experts"
    INDEXER_TOPK = "indexer_topk"
    HIDDEN_STATES = "hidden_states"
    ADAPTER = "adapter"
    NO_CACHE_INSERT = "no_cache_insert"
    BEAM = "beam"

    def __str__(self) -> str:
        return self.value
