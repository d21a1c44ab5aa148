"""Seeded text of a wanted length in tokens, from a fixed list of plain words.

Lengths are in tokens: approximate through `TOKENS_PER_WORD` (prose) and `approximate_tokens` (code, JSON), or exact
when a tokenizer is given. Must not know what the text is for.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

from pic_traces.errors import TraceError

__all__ = ["TOKENS_PER_WORD", "WORDS", "CountTokens", "approximate_tokens", "load_token_counter", "make_text"]

TOKENS_PER_WORD = 1.11
"""Tokens of a generated word with its share of the full stops, by SmolLM2's tokenizer (mean of 100,000 words)."""

CountTokens = Callable[[str], int]

_VOCABULARY = """
able account across action active address after agent air also amount animal answer appear apple area around arrive
artist ask author autumn bag balance bank basket beach before begin behind benefit better between bicycle bird board
boat book border bottle bottom branch bread bridge bright bring brother brush build bus button call camera capital
care carry castle catch cause center chair chance change chapter check child choice circle city class clean clear
climb clock close cloud coast coffee cold collect color common company complete copy corner cotton count country
course cover create cross cup current curtain customer dance danger dark daughter day decide deep degree depend
desert design desk detail develop different dinner direct discover distance doctor door double draw dream dress
drive dry during each early earth east easy edge effect effort egg electric empty energy engine enjoy enough enter
entire equal escape even evening event every exact example expect explain express eye face fact fair fall family
famous far farm fast father favor field figure final find fine finger finish fire first fish flat flight floor
flower fly follow food forest forget form fortune forward found fresh friend front fruit full future garden gate
gather general gentle give glass goal gold good grain grass gray great green ground group grow guard guess guest
guide half hall hand happen harbor hard harvest hat head health hear heart heavy help hidden high hill history hold
home honest hope horse hotel hour house human hundred hunt ice idea image imagine inch include inside iron island
join journey judge jump keep key kind king kitchen know label ladder lake lamp land language large last late laugh
lead leaf learn least leave left letter level library lift light limit line list listen little local long look loud
love low lunch machine main make map mark market master match matter meadow measure meat medicine member memory
message metal middle mile milk mind minute mirror modern moment money month moon morning mother motor mountain mouth
move music name narrow nation nature near neck need neighbor never new night noise north nose note number object
ocean offer office oil old open orange order other outside over owner page paint pair paper parent park part pass
path pattern peace pencil people perfect person picture piece place plain plane plant plate play please pocket point
poor popular port possible post power practice prepare present press price print problem produce promise proud prove
public pull purple push quality quarter queen question quick quiet rain raise reach read ready reason receive record
red region remember repair repeat reply report rest result return rice rich ride right ring rise river road rock
roof room root rope round rule run sail salt same sand save school science season seat second secret seem sell send
serve settle seven shade shadow shape share sharp shelf shell shine ship shirt shoe shop shore short shoulder show
side sign silver simple sing sister size skill sky sleep slow small smile smoke snow soft soil soldier solid solve
song soon sound south space speak special speed spend spoon spring square stage stair stand star start station stay
steel step still stone stop store storm story straight strange stream street strong student study sudden sugar
summer sun supply support sure surface sweet swim table tail talk tall taste teach team tell temple ten test thick
thin thing think thread ticket tide time tiny together tomorrow tool top total touch tower town track trade train
travel tree trip true trust try turn twelve twenty under unit until upper use valley value village visit voice wait
walk wall want warm wash watch water wave way wear weather week weight well west wheel white whole wide wild wind
window winter wish wood wool word work world wrong yard year yellow young
"""
WORDS = tuple(_VOCABULARY.split())
"""The words that all generated text is made of, in alphabetical order."""

# A line break with its indentation is a token of its own; digits are mostly one token each.
_PIECE = re.compile(r"\n\s*|\d|_|[^\W\d_]+|[^\w\s]+")


def make_text(rng: random.Random, num_tokens: int, count_tokens: CountTokens | None = None) -> str:
    """Random words as sentences, `num_tokens` tokens long; the same `rng` state gives the same text.

    With `count_tokens` the length is exact where whole words can hit it, and never more than `num_tokens`. O(n log n).
    """
    if num_tokens <= 0:
        return ""
    if count_tokens is None:
        return _sentences(rng, max(1, round(num_tokens / TOKENS_PER_WORD)))
    words = _sentences(rng, num_tokens + 1).split(" ")
    low, high = 0, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        if count_tokens(" ".join(words[:middle])) <= num_tokens:
            low = middle
        else:
            high = middle - 1
    text = " ".join(words[:low])
    # A word of several tokens may not fit where one token is left: a one-token word does.
    while count_tokens(longer := f"{text} go" if text else "Go") <= num_tokens:
        text = longer
    return text


def approximate_tokens(text: str) -> int:
    """About how many tokens code, compact JSON or prose has.

    Within 10 % of SmolLM2's tokenizer for what the generators write, from 100 tokens on. O(n).
    """
    return len(_PIECE.findall(text))


def load_token_counter(folder: str) -> CountTokens:
    """A counter that uses `tokenizer.json` in `folder` (needs the package `tokenizers`).

    Raises:
        TraceError: the package or the file is missing, or the file cannot be read.
    """
    path = Path(folder).expanduser() / "tokenizer.json"
    if not path.is_file():
        raise TraceError(f"tokenizer={folder!r}: {path} does not exist; a folder with a tokenizer.json is expected")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise TraceError(f"tokenizer={folder!r}: needs the package `tokenizers`: pip install tokenizers") from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise TraceError(f"tokenizer={folder!r}: {path} cannot be read: {error}") from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _sentences(rng: random.Random, num_words: int) -> str:
    words: list[str] = []
    left = 0
    for _ in range(num_words):
        word = rng.choice(WORDS)
        if left == 0:
            left = rng.randint(6, 14)
            word = word.capitalize()
        left -= 1
        words.append(f"{word}." if left == 0 else word)
    return " ".join(words)
