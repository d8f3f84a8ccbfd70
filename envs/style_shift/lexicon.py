# ruff: noqa: RUF001, E501, SIM905 (Chinese punctuation, and wide characters that count double, are meant)
"""The word lists of the lexical judge: patterns and weights by style and language. Data, no decisions.

A weight of 2 is a word that hardly stands in another style, 1 one that leans, 0.5 a hint. Separators are spaces;
`_` in a pattern stands for one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from envs.style_shift.prompts import Language

_ENGLISH: Mapping[str, Mapping[float, str]] = {
    "academic": {
        2.0: r"""stud(?:y|ies) results?_(?:indicate|show|suggest|demonstrate)\w* findings? hypothes[ie]s empirical\w*
            methodolog\w+ literature correlat\w+ significant\w* furthermore consequently variables? framework
            theoretical\w* participants surveys? previous_research observations_suggest evidence mechanisms?
            quantif\w+ regression statistical\w* researchers? phenomen(?:on|a) correlation this_paper experiment\w*
            data analys[ie]s relationship_between associated_with linked_to in_addition may_be_understood
            constitut\w+ characteri[sz]ed""",
        1.0: r"""therefore however nevertheless moreover thus indicat\w+ demonstrat\w+ suggest\w* examin\w+
            investigat\w+ observ\w+ primar(?:y|ily) effects? factors? measur\w+ process(?:es)? relation(?:ship)?s?
            function(?:s|ing)? species temperatures? according_to principal\w* moderate institution\w* considerable
            consistent capacity limited regulat\w+ influenc\w+ compounds? determin\w+ reflects? provid\w+ improv\w+
            required on_average widely_documented subject_of""",
    },
    "cute": {
        2.0: r"""aww+ yay+ hehe\w* teehee whee+ yummy nom snuggl\w+ cuddl\w+ fluffy cutie\w* cutest adorable teeny
            wee cosy cozy bestie hugs? sweetie kitten\w* bunn(?:y|ies) pupp(?:y|ies) giggl\w+ wiggl\w+ tickl\w+ chubby
            fuzzy woolly squishy uwu cupcake\w* sprinkles choo nuzzl\w+ boop sooo+ paws? lil smiley button_nose
            pitter patter splish splash teddy darling""",
        1.0: r"""tiny cute little baby sweet\w* toes cheeks happy gummy cookies? napp?\w* sleepy pink heart polka
            dots hop\w* bounc\w+ smil\w+ blanket warm wobbly pat dear lovely friend\w* ladybug\w* joy dancing melts?
            pretty present""",
    },
    "chuunibyou": {
        2.0: r"""mortals? abyss\w* seal(?:ed|s|ing)? darkness forbidden behold curse[ds]? demon\w* awaken\w* kneel
            familiar apocalypse mwaha\w* hmph heh grimoire prophec(?:y|ies) destin(?:y|ed) chosen_one dark_(?:power|
            aura|soul|lord|flame|force)s? shadow_\w+ true_(?:power|name|form) (?:right|left)_(?:arm|eye|hand)
            magic_circle blood_contract void eternal_night world_shall bandaged unleash\w* underworld dragon
            organization evil_eye""",
        1.0: r"""power\w* fate eye dark shadows? crimson souls? fools? foolish flames? blood contract eternal lord
            ancient tremble\w* summon\w* battle command former_life guardian chosen elixir wings devour\w* foretold
            black thousand_years dwells_within shattered aura king""",
    },
    "classical": {
        2.0: r"""thou thee thy thine hath doth dost hast art_thou ere '?tis yonder alas lo hark forsooth verily
            prithee whence whither o'er e'er ne'er naught mine_eyes quoth methinks '?twas wherefore unto nay
            shalt wilt didst canst ye o(?=_\w) (?!teeth|beneath|underneath|seth)\w{2,}eth hail""",
        1.0: r"""upon shall dwelling noble maiden forth gaze[ds]? lament\w* beams nightingale lark morn many_a
            gentle weary sorrows? sleeping blessed pilgrim wisdom grace rests? softly silver vale fragrant quench
            leagues evening ever mournful boundless humble whilst didst rose pale bids? wandering silent""",
    },
}

_CHINESE: Mapping[str, Mapping[float, str]] = {
    "academic": {
        2.0: """研究 表明 结果 显著 机制 实证 假设 变量 文献 综述 相关性 本文 数据 分析 量化 理论 框架 模型 证据 综上 效应
            特征 调查 被试 实验 指出 现象 可测量 核心价值 结论 相关""",
        1.0: """因此 然而 此外 影响 考察 观察 验证 具有 模式 因素 功能 系统 结构 有效 提升 过程 程度 作用 周期 关系 主要 反映
            变化 有助于 意义 机构 视为 构成 仍有 有限 依赖 多项 条件""",
    },
    "cute": {
        2.0: """呀 啦 哒 嘻嘻 萌 喵 么么 宝宝 人家 软乎乎 毛茸茸 抱抱 小爪 嘛 哟 胖嘟嘟 圆滚滚 咔嚓 乖 睡觉觉 小可爱 [~～]
            [♡♥❤] 小脚丫 脚丫 糖糖 挥手手 小花花 兔兔 狗狗 猫咪""",
        1.0: """可爱 呢 好软 好开心 甜 小饼干 软糖 哦 粉粉 幸福 亲亲 哇 跳舞 笑 滴答 哗啦 小熊 礼物 好玩 爱心 小裙子
            呜呜 超级""",
    },
    "chuunibyou": {
        2.0: """封印 黑暗 深渊 觉醒 凡人 邪王 邪眼 真眼 吾之 魔龙 恶魔 诅咒 禁忌 暗影 漆黑 宿命 使魔 契约 末日 魔法阵 颤抖吧 愚蠢
            愚者 右臂 左手 左眼 魔王 魔神 魔剑 永恒之夜 永夜 真名 禁书 虚空 终焉 臣服 跪下 之力 被选中 绷带 前世 预言""",
        1.0: """命运 灵魂 吾 力量 血色 吞噬 哼 毁灭 世界 战斗 决战 我乃 看吧 降临 组织 血之 黑猫 之翼 哈哈哈 荆棘 守护者
            上古 退下""",
    },
    "classical": {
        2.0: """矣 兮 焉 哉 曰 乎 耳 者， 也。 也； 余 霏霏 嗟 噫 岂不 何夕 之谓 若有 不觉 竟忘 须臾 与君 故人 君子 遂""",
        1.0: """之 其 而 乃 皓月 把酒 皆 甚 虽 然则 唯 但见 以记 沧海 登高 独坐 千古 怅然 庭 怀古 清辉 倚窗 暮 世事 润物 荷锄
            如墨 如雪 如星 何之 孤舟""",
    },
}


def _compile(
    lists: Mapping[str, Mapping[float, str]], english: bool
) -> dict[str, tuple[tuple[re.Pattern[str], float], ...]]:
    compiled = {}
    for style, weighted in lists.items():
        patterns = []
        for weight, listed in weighted.items():
            # A pattern that was wrapped inside a group was split by the line break: put it together again.
            for term in re.sub(r"\|\s+", "|", listed).split():
                source = rf"(?<![\w']){term.replace('_', ' ')}(?!\w)" if english else term
                patterns.append((re.compile(source), weight))
        compiled[style] = tuple(patterns)
    return compiled


STYLE_PATTERNS: Mapping[Language, Mapping[str, tuple[tuple[re.Pattern[str], float], ...]]] = {
    "en": _compile(_ENGLISH, True),
    "zh": _compile(_CHINESE, False),
}
"""By language and style: patterns, for text in lower case with single spaces, and their weights."""

CUTE_SHAPES = (
    (re.compile(r"[~～♡♥❤]"), 1.5),
    (re.compile(r"\b([a-z]{3,})-\1|\b(\w)\w+-\2\w+\b"), 1.5),
    (re.compile(r"([a-z])\1\1"), 1.0),
)
"""What makes an English text look cute beyond words: hearts, doubled sounds, drawn-out letters."""

FUNCTION_WORDS = frozenset(
    """a an the and or but nor so yet if when while as than that which who whom this these those it its is are was were
    be been being am do does did have has had will would can could may might must should not no of in on at to from by
    with for about into over under after before between within beneath through during without i me my mine you your he
    him his she her we us our they them their there here what how where why all every each some any more most one
    up down out only just then too very upon unto ere thou thee thy thine hath doth""".split()
)  # fmt: skip
"""English words that hold a sentence together and say nothing of its topic."""

FORM_WORDS = frozenset(
    """write short text describe say something few lines line tell sentences sentence two three style please poem
    paragraph words story old make give piece""".split()
)  # fmt: skip
"""Words of English prompts that are not their topic."""

FORM_CHARACTERS = frozenset("写一段关于的短文用两句话描述说谈几次只些请篇首个给我来点章下大小老高自行夜关天")
"""Characters of Chinese prompts that are not their topic, or too common to tell it."""

TO_THE_JUDGE = re.compile(
    r"\b(?:judge|rubric|full marks?|perfect score|highest (?:mark|score)|quality\W{0,3}[01]|ignore (?:all|the|your|my|"
    r"previous|any)\b.{0,40}\b(?:instructions?|rules|rubric)|your instructions|score (?:this|me)|rate this)\b"
    r"|评审|评委|评分|满分|打分|判官|忽略.{0,8}指令|上上之等"
)
"""Words to the reader who decides."""

SALAD = re.compile(
    r"\b(?:a|an|the|my|thy|your) (?:of|is|was|are|and|to|by|in|have|been|shall|so|for|with|hath|doth|from)\b"
    r"|的[了与之被于把]|被[与向了的是抱]|在[与了被的]|了于|[与于]与|与其因"
)
"""Pairs of small words that no sentence holds."""
