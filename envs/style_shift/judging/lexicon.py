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
            constitut\w+ characteri[sz]ed meta-\w+ we_(?:show|propose|find|argue|observe) attributed_to
            by_reference_to census hypothesi[sz]e\w* non-\w+ly variance association covari\w+ longitudinal cohort
            systematic_review this_(?:interpretation|paper|work|finding|effect) the_present_(?:study|work|paper)
            prior_work interdisciplinary notably socio\w+ respectively widely_(?:regarded|considered|documented)""",
        1.0: r"""therefore however nevertheless moreover thus indicat\w+ demonstrat\w+ suggest\w* examin\w+
            investigat\w+ observ\w+ primar(?:y|ily) effects? factors? measur\w+ process(?:es)? relation(?:ship)?s?
            function(?:s|ing)? species temperatures? according_to principal\w* moderate institution\w* considerable
            consistent capacity limited regulat\w+ influenc\w+ compounds? determin\w+ reflects? provid\w+ improv\w+
            required on_average widely_documented subject_of governed adopt\w+ extent assess\w* historians? scholars?
            recent modest moderat\w+ density retention depends_on non-\w+ commonly justified arguably context
            perspective impact\w* attribut\w+ distribution organi[sz]ed labour structur\w+ propagate\w* implications?
            approach typically approximately interpretation role_of contribut\w+ associat\w+ prevalen\w+ era cultural""",
    },
    "cute": {
        2.0: r"""aww+ yay+ hehe\w* teehee whee+ yummy nom snuggl\w+ cuddl\w+ fluffy cutie\w* cutest adorable teeny
            wee cosy cozy bestie hugs? sweetie kitten\w* bunn(?:y|ies) pupp(?:y|ies) giggl\w+ wiggl\w+ tickl\w+ chubby
            fuzzy woolly squishy uwu cupcake\w* sprinkles choo nuzzl\w+ boop sooo+ paws? lil smiley button_nose
            pitter patter splish splash teddy darling whoosh zoom boing ting-a-ling quack\w* meow\w* purr\w* woof ooh+ oops\w* yippee
            hihi eek mwah weeny itty-bitty duck(?:y|ies) bird(?:y|ie|ies) dogg(?:y|ies) kitt(?:y|ies) tummy mumm?y
            marshmallows? mittens unicorns? plush\w* sparkl(?:y|ies) lovey cuddlebug squeak\w* tippy toesies jelly
            beep twinkly? lollipops? wuv goof\w* hooray hamster wittle nosey huggies""",
        1.0: r"""tiny cute little baby sweet\w* toes cheeks happy gummy cookies? napp?\w* sleepy pink heart polka
            dots hop\w* bounc\w+ smil\w+ blanket warm wobbly pat dear lovely friend\w* ladybug\w* joy dancing melts?
            pretty present silly dreamy balloons? pal candy rainbows? basket bell tumbl\w+ snowm[ae]n? pinch peek\w* hello
            giddy jumpy sunshine cheerful sugar honey pocket cheeky dance[sd]? favou?rite treat naughty hi grin\w*""",
    },
    "chuunibyou": {
        2.0: r"""mortals? abyss\w* seal(?:ed|s|ing)? darkness forbidden curse[ds]? demon\w* awaken\w* kneel
            familiar apocalypse mwaha\w* hmph heh grimoire prophec(?:y|ies) destin(?:y|ed) chosen_one dark_(?:power|
            aura|soul|lord|flame|force)s? shadow_\w+ true_(?:power|name|form) (?:right|left)_(?:arm|eye|hand)
            magic_circle blood_contract void eternal_night world_shall bandaged unleash\w* underworld dragon
            organization evil_eye infernal realms? runes? wrath commoners third_eye reincarnat\w* fufufu\w* kukuku\w*
            assassins? nightwalker eyepatch arcane hellfire oblivion annihilat\w* weaklings? incantations? sorcer\w+
            true_heir hidden_form false_gods? my_(?:full_)?(?:might|wrath) gauntlet cower grovel\w* doomed vessel_of
            dark_\w+ cataclysm\w* nether\w* phantom\w* necro\w* i_am_(?:the|no)_\w+_of otherworldly ultimate_\w+""",
        1.0: r"""power\w* fate eye dark shadows? crimson souls? fools? foolish flames? blood contract eternal lord
            ancient tremble\w* summon\w* battle command former_life guardian chosen elixir wings devour\w* foretold
            black thousand_years dwells_within shattered aura king behold council gods? emperor beast lightning burn\w* obey worthless legend\w* heir flee might ice
            dust trial restrain\w* regret lord_of throne domain conquer\w* destroy\w* witness tremor storm rage vessel
            slumber\w* rise\w* release scythe blade raven angels? hidden""",
    },
    "classical": {
        2.0: r"""thou thee thy thine hath doth dost hast art_thou ere '?tis yonder alas lo hark forsooth verily
            prithee whence whither o'er e'er ne'er naught mine_eyes quoth methinks '?twas wherefore unto nay
            shalt wilt didst canst ye o(?=_\w) (?!teeth|beneath|underneath|seth)\w{2,}eth hail durst e'en anon mayhap perchance fain betwixt
            twain hither thither thence whosoe'er raiment nigh weepeth art_thou be_he wert dwelt minstrels? oft
            spake beseech bid_thee good_sir""",
        1.0: r"""upon shall dwelling noble maiden forth gaze[ds]? lament\w* beams nightingale lark morn many_a
            gentle weary sorrows? sleeping blessed pilgrim wisdom grace rests? softly silver vale fragrant quench
            leagues evening ever mournful boundless humble whilst didst rose pale bids? wandering silent behold steed hushed virgin wanton westward kin stranger tower slain woe hence bosom amongst countenance
            sire peace moor raven hearth swift\w* heavens brook dew dawn yea sighs? doom of_old let_us youth
            beggar comfort lords? lady swallow meadow""",
    },
}

_CHINESE: Mapping[str, Mapping[float, str]] = {
    "academic": {
        2.0: """研究 表明 结果 显著 机制 实证 假设 变量 文献 综述 相关性 本文 数据 分析 量化 理论 框架 模型 证据 综上 效应
            特征 调查 被试 实验 指出 现象 可测量 核心价值 结论 相关 元分析 归因 学界 争议 旨在 资料 方差 关联 分布 非线性 制约 尚存 普查 样本 学者 归纳 维度 统计 视角 范式 本章 评估""",
        1.0: """因此 然而 此外 影响 考察 观察 验证 具有 模式 因素 功能 系统 结构 有效 提升 过程 程度 作用 周期 关系 主要 反映
            变化 有助于 意义 机构 视为 构成 仍有 有限 依赖 多项 条件 影响 依据 普及 改变 范围 差异 水平 趋势 计算 调节 支持 解释 方式 传播 密度 偏差 正向 体现 促进 通常 社会 组织 该 恒定 共同 环境 报告 显示 近期 主要 来源""",
    },
    "cute": {
        2.0: """呀 啦 哒 嘻嘻 萌 喵 么么 宝宝 人家 软乎乎 毛茸茸 抱抱 小爪 嘛 哟 胖嘟嘟 圆滚滚 咔嚓 乖 睡觉觉 小可爱 [~～]
            [♡♥❤] 小脚丫 脚丫 糖糖 挥手手 小花花 兔兔 狗狗 猫咪 喔 嘿嘿 叮铃 软绵绵 香喷喷 棉花糖 鸭鸭 帽帽 吃吃 蹦蹦 咕咚 啾 咩 吧唧 耶 腮帮 小笨蛋 嘟嘟 呼噜 飘呀 糯糯 奶声 小家伙 贴贴 咕噜""",
        1.0: """可爱 呢 好软 好开心 甜 小饼干 软糖 哦 粉粉 幸福 亲亲 哇 跳舞 笑 滴答 哗啦 小熊 礼物 好玩 爱心 小裙子
            呜呜 超级 调皮 迷你 气球 彩虹 泡泡 好舒服 小鸭 小鸟 小篮子 枕头 粉色 好棒 摇摇 偷偷 好喜欢 呼呼 笨蛋 咚 暖暖 甜甜""",
    },
    "chuunibyou": {
        2.0: """封印 黑暗 深渊 觉醒 凡人 邪王 邪眼 真眼 吾之 魔龙 恶魔 诅咒 禁忌 暗影 漆黑 宿命 使魔 契约 末日 魔法阵 颤抖吧 愚蠢
            愚者 右臂 左手 左眼 魔王 魔神 魔剑 永恒之夜 永夜 真名 禁书 虚空 终焉 臣服 跪下 之力 被选中 绷带 前世 预言 魔力 真身 转生 伪神 灰飞烟灭 本王 本座 眼罩 地狱 第三只眼 庸人 试炼 符文 两界 之炎 之雷 汝等 蝼蚁 审判 轮回 血脉 结界 异世界 冥界 魔法 咒文 暗黑 禁咒 元老院 呵呵呵 护手 皇帝 支配者 神罚 毁天""",
        1.0: """命运 灵魂 吾 力量 血色 吞噬 哼 毁灭 世界 战斗 决战 我乃 看吧 降临 组织 血之 黑猫 之翼 哈哈哈 荆棘 守护者
            上古 退下 灰烬 继承者 悔恨 刺客 怒火 逃吧 沉睡 苏醒 支配 炎 魔 冥 之刻 必将 释放 束缚 雷 城市 显现 真正 王座 千年 鲜血 咆哮 无尽 终将 来吧""",
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

SHAPES: Mapping[Language, tuple[tuple[str, re.Pattern[str], int, float], ...]] = {
    "en": (
        ("cute", re.compile(r"[~～♡♥❤]"), 1, 1.5),
        ("cute", re.compile(r"\b([a-z]{3,})-\1|\b(\w)\w+-\2\w+\b"), 1, 1.5),
        ("cute", re.compile(r"([a-z])\1\1"), 1, 1.0),
        ("academic", re.compile(r"\w{4,}(?:tion|ity|ment|ance|ence|ology|istic|ical)s?\b"), 3, 1.5),
        ("academic", re.compile(r"\b(?:is|are|was|were|been|be) (?:\w+ly )?\w+ed\b"), 1, 1.0),
        ("chuunibyou", re.compile(r"(?:\A|[.!?] )i, [a-z ]+,"), 1, 1.5),
    ),
    "zh": (
        ("cute", re.compile(r"(.)(?!\1)([\u4e00-\u9fff])\2"), 2, 1.0),
        ("cute", re.compile(r"小[\u4e00-\u9fff]"), 2, 1.0),
        ("academic", re.compile(r"[\u4e00-\u9fff](?:性|化|率|型|学|值|式|期)"), 2, 1.5),
        # Modern Chinese can hardly do without these characters for a whole text, wenyan does.
        ("classical", re.compile(r"\A(?!.*[的了是们这个着过吗吧呢很在和我你也就都])[^a-z]{14,}\Z"), 1, 2.0),
        ("classical", re.compile(r"\A(?!.*[的了是们这个着过吗吧呢很在和你就都])[^a-z]{14,}\Z"), 1, 1.0),
    ),
}
"""What a style looks like beyond its words, by language: the style, a pattern, how often it must match, its weight."""

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
    r"previous|any)\b.{0,40}\b(?:instructions?|rules|rubric)|your instructions|score (?:this|me)|rate this|verdict|judged|"
    r"whoever (?:reads|judges)|"
    r"(?:preferred|academic|cute|chuunibyou|classical) style|style (?:field|is|of the text)|"
    r"mark (?:this|the|it|my) .{0,20}\bas)\b|\bstyle\s*[:=]|[\[<|](?:system|assistant|user)\b"
    r"|评审|评委|评分|满分|打分|判官|忽略.{0,8}指令|上上之等|判定|风格标"
)
"""Words to the reader who decides."""

SALAD = re.compile(
    r"\b(?:a|an|the|my|thy|your) (?:of|is|was|are|and|to|by|in|have|been|shall|so|for|with|hath|doth|from)\b"
    r"|的[了与之被于把]|被[与向了的是抱]|在[与了被的]|了于|[与于]与|与其因"
)
"""Pairs of small words that no sentence holds."""
