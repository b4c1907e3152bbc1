"""Makes a BERT tokenizer without a download, from the vocabulary in the open_clip package."""

from __future__ import annotations

import re
import string

from edje_index.models._torchvision_compat import prepare_torchvision
from edje_index.models.joint_inputs import IMAGE_TOKEN, JointTokenizer

prepare_torchvision()

from open_clip.tokenizer import SimpleTokenizer  # noqa: E402
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PLAIN = re.compile(r"[a-z0-9]+")
WORD_END = "</w>"


def untrained_tokenizer(words: int) -> JointTokenizer:
    """Make a WordPiece tokenizer with ``words`` entries from the vocabulary of open_clip.

    The last entry is ``<image>``.
    """
    # Entries that end a word (``</w>``) become words, other entries become pieces (``##``). Single letters and digits
    # are added, so that no lower-case ASCII word is unknown.
    vocabulary = {piece: token_id for token_id, piece in enumerate((*_pieces(words), IMAGE_TOKEN))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        additional_special_tokens=[IMAGE_TOKEN],
    )
    return JointTokenizer.of(wrapped)


def _pieces(count: int) -> list[str]:
    letters = string.ascii_lowercase + string.digits
    pieces = dict.fromkeys((*SPECIAL, *string.punctuation, *letters, *("##" + c for c in letters)))
    base = len(pieces)
    for entry in SimpleTokenizer().encoder:
        if len(pieces) >= base + count:
            break
        if PLAIN.fullmatch(entry.removesuffix(WORD_END)):
            pieces[entry.removesuffix(WORD_END) if entry.endswith(WORD_END) else "##" + entry] = None
    return list(pieces)
