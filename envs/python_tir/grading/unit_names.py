"""The closed list of what may stand beside a number: units, things that are counted, scale words."""

from __future__ import annotations

from fractions import Fraction

_TABLE: dict[str, tuple[str, str]] = {
    "length": ("m metre meter 米", "1"),
    "length/100": ("cm centimetre centimeter 厘米", "1/100"),
    "length/1000": ("mm millimetre millimeter 毫米", "1/1000"),
    "length*1000": ("km kilometre kilometer 千米 公里", "1000"),
    "length/in": ("in inch inches", "0.0254"),
    "length/ft": ("ft foot feet", "0.3048"),
    "length/yd": ("yd yard", "0.9144"),
    "length/mi": ("mi mile", "1609.344"),
    "mass": ("kg kilogram kilo 千克 公斤", "1"),
    "mass/g": ("g gram gramme 克", "1/1000"),
    "mass/mg": ("mg milligram 毫克", "1/1000000"),
    "mass/t": ("tonne 吨", "1000"),
    "mass/ton": ("ton", "907.18474"),
    "mass/lb": ("lb lbs pound-mass", "0.45359237"),
    "mass/oz": ("oz ounce", "0.028349523125"),
    "time": ("s sec second 秒 秒钟", "1"),
    "time/min": ("min minute 分钟", "60"),
    "time/h": ("h hr hour 小时", "3600"),
    "time/d": ("day 天 日", "86400"),
    "time/w": ("week 周 星期", "604800"),
    "month": ("month 个月", "1"),
    "year": ("yr year 年 岁", "1"),
    "volume": ("L l litre liter 升", "1/1000"),
    "volume/ml": ("mL ml millilitre milliliter 毫升", "1/1000000"),
    "gallon": ("gallon gal", "1"),
    "force": ("newton", "1"),
    "energy": ("J joule", "1"),
    "energy/1000": ("kJ kilojoule", "1000"),
    "calorie": ("calorie", "1"),
    "power": ("W watt", "1"),
    "voltage": ("volt", "1"),
    "current": ("ampere amp", "1"),
    "frequency": ("Hz hertz", "1"),
    "dollar": (r"\$ dollar usd buck", "1"),
    "dollar/100": ("cent", "1/100"),
    "euro": (r"\euro euro eur", "1"),
    "pound": (r"\pounds gbp", "1"),
    "yen": (r"\yen yen jpy", "1"),
    "yuan": ("yuan rmb cny 元", "1"),
    "rupee": ("rupee", "1"),
    "percent": (r"\% percent pct", "1/100"),
    "degree": (r"^\circ degree deg 度", "1"),
    "celsius": (r"^\circC celsius", "1"),
    "fahrenheit": (r"^\circF fahrenheit", "1"),
    "radian": ("rad radian", "1"),
}
UNITS: dict[str, tuple[str, Fraction]] = {
    name: (row.split("/")[0].split("*")[0], Fraction(factor))
    for row, (names, factor) in _TABLE.items()
    for name in names.split()
}
"""Every unit's name: its dimension and its factor to the base of that dimension."""

_COUNTED = """
apple orange pear banana cookie candy cake pie egg muffin sandwich pizza slice piece bag box basket bottle cup
glass jar can pack packet package bucket carton crate tray plate bowl spoon tablespoon teaspoon serving person
people man men woman women child children boy girl kid adult student teacher pupil friend player team member
employee worker guest passenger customer visitor resident animal dog cat bird fish cow sheep horse chicken pig
duck rabbit frog bee ant spider leg car bus truck bike bicycle train plane boat ship ticket book page word
letter pencil pen notebook paper sheet card stamp sticker coin penny pennies nickel dime quarter bill marble
ball toy doll game puzzle point goal run lap mile-run step stair block brick tile board plank stick rope ribbon
flower rose plant tree seed leaf leaves branch room house building floor window door chair table seat row column
line side edge vertex vertices face diagonal triangle square circle rectangle cube sphere angle way arrangement
permutation combination solution root value number integer digit divisor factor multiple prime pair triple tuple
subset set element function path route outcome case possibility term sequence polynomial matrix song movie show
episode photo picture trip visit shift class course lesson test exam question problem answer hat shirt shoe sock
dress pant jacket unit time turn round match matches vote item object thing part share dozen-egg bead button
star planet shell rock stone gift present balloon fruit vegetable tomato tomatoes potato potatoes carrot onion
watermelon lemon mango peach grape cherry cherries strawberry strawberries foot-step pet puppy puppies kitten
acre
"""
COUNTED = frozenset(_COUNTED.split())
"""Things that are counted, in the singular. Each is a dimension of its own: 5 apples are not 5 pears."""

_COUNTERS_TEXT = """
个 只 人 名 位 本 张 条 块 颗 棵 头 辆 次 种 页 件 支 朵 道 套 双 对 枚 根 间 分 题 步 组 倍
"""
COUNTERS = frozenset(_COUNTERS_TEXT.split())
"""Chinese counters, which say of what kind the counted things are and not how many."""

SCALES: dict[str, Fraction] = {
    **{name: Fraction(10) ** power for name, power in (
        ("hundred", 2), ("thousand", 3), ("million", 6), ("billion", 9), ("trillion", 12), ("百", 2), ("千", 3),
        ("万", 4), ("百万", 6), ("亿", 8),
    )},
    "dozen": Fraction(12),
}  # fmt: skip
"""Words that multiply the number before them."""

NOTHING = frozenset({"unit", "units", "total", "altogether", "each"})
"""Words that say nothing about a number's size or kind."""


def unit_named(word: str) -> tuple[str, Fraction] | None:
    """The dimension and the factor of one unit word; None for a word that is not on the list."""
    for name in (word, word.lower(), _singular(word), _singular(word.lower())):
        if name in UNITS:
            return UNITS[name]
    for name in (word.lower(), _singular(word.lower()), word.lower().removesuffix("es")):
        if name in COUNTED:
            return _singular(name), Fraction(1)
    return None


def _singular(word: str) -> str:
    return word.removesuffix("s") if len(word) > 2 else word
