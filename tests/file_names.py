"""
Honest and hostile file names, and what becomes of each.

A name is sent, and has three forms: on the wire, for people, and as a local file.
"""

from dataclasses import dataclass

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"


@dataclass(frozen=True, slots=True)
class Name:
    """The name that a sender gives, and its three forms."""

    sent: str
    wire: str
    shown_as: str | None = None
    local_as: str | None = None

    @property
    def shown(self) -> str:
        """For people; by default as it was sent."""
        return self.sent if self.shown_as is None else self.shown_as

    @property
    def local(self) -> str:
        """In an empty directory; by default as it is shown."""
        return self.shown if self.local_as is None else self.local_as


PLAIN = [
    Name("report.pdf", "report.pdf"),
    Name("Quarterly report (final).pdf", "Quarterly_report__final_.pdf"),
    Name("archive.tar.gz", "archive.tar.gz"),
    Name("README", "README"),
    Name("v1.2 of the plan", "v1.2_of_the_plan"),
    Name("$HOME.txt", "_HOME.txt"),
    Name("`id`.sh", "_id_.sh"),
    Name("a;b&c.sh", "a_b_c.sh"),
    Name("%2e%2e%2fetc", "_2e_2e_2fetc"),
    Name("~", "_"),
]

LANGUAGES = [
    Name("\xdcberweisung.pdf", "_berweisung.pdf"),
    Name("stra\xdfe.txt", "stra_e.txt"),
    Name("\u0130stanbul.txt", "_stanbul.txt"),
    Name("\u043d\u0430\u0443\u043a\u0430.txt", "_____.txt"),
    Name("\u65e5\u672c\u8a9e.docx", "___.docx"),
    Name("\ud55c\uad6d\uc5b4.hwp", "___.hwp"),
    Name("\u0e44\u0e1f\u0e25\u0e4c.pdf", "____.pdf"),
    Name("\u0939\u093f\u0928\u094d\u0926\u0940.txt", "______.txt"),
    Name("\u05ea\u05de\u05d5\u05e0\u05d4.png", "_____.png"),
    Name("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645.txt", "________.txt"),
]

# macOS sends decomposed letters; on disk they must equal those that Linux and Windows write.
NORMALISED = [
    Name("man\u0303ana.txt", "man_ana.txt", local_as="ma\xf1ana.txt"),
    Name("\u1112\u1161\u11ab.hwp", "___.hwp", local_as="\ud55c.hwp"),
    Name("\u212bngstr\xf6m.txt", "_ngstr_m.txt", local_as="\xc5ngstr\xf6m.txt"),
    Name("3.04\u202fPM.png", "3.04_PM.png", local_as="3.04 PM.png"),
    Name("no\xa0break.txt", "no_break.txt", local_as="no break.txt"),
]

EMOJI = [
    Name("\U0001f389.png", "_.png"),
    Name(f"{FAMILY}.png", "_____.png"),
    Name("\U0001f44d\U0001f3fd.gif", "__.gif"),
    Name("\U0001f1e9\U0001f1ea.svg", "__.svg"),
    # Tags are invisible, and can hide a text for programs.
    Name("\U0001f3f4\U000e0067\U000e0062\U000e007f.txt", "____.txt", "\U0001f3f4.txt"),
]

INVISIBLE = [
    Name("photo\u202egnp.exe", "photo_gnp.exe", "photognp.exe"),
    Name("\u2066isolated\u2069.txt", "_isolated_.txt", "isolated.txt"),
    Name("zero\u200bwidth.txt", "zero_width.txt", "zerowidth.txt"),
    Name("\ufeffmarked.txt", "_marked.txt", "marked.txt"),
    Name("soft\xadhyphen.txt", "soft_hyphen.txt", "softhyphen.txt"),
    Name("\u200f\u05d0.png", "__.png", local_as="\u05d0.png"),
    Name("nul\x00byte.txt", "nul_byte.txt", "nulbyte.txt"),
    Name("tab\there.txt", "tab_here.txt", "tabhere.txt"),
    Name("line\nbreak.txt", "line_break.txt", "linebreak.txt"),
    Name("\x1b[2J.txt", "__2J.txt", "[2J.txt"),
    Name("\x7f.txt", "_.txt", ".txt", "_.txt"),
    Name("para\u2029graph.txt", "para_graph.txt", "paragraph.txt"),
]

PATHS = [
    Name("../../etc/passwd", "passwd", "passwd"),
    Name("/etc/shadow", "shadow", "shadow"),
    Name("C:\\Users\\ana\\a.txt", "C__Users_ana_a.txt", "a.txt"),
    Name("..\\..\\b.txt", ".._.._b.txt", "b.txt"),
    Name(".ssh/authorized_keys", "authorized_keys", "authorized_keys"),
    Name("folder/", "file", "file"),
    Name(".", "file", "file"),
    Name("..", "file", "file"),
    Name("...", "...", local_as="file"),
]

# Hidden files take effect unseen, and a leading dash is a flag to many programs.
LEADING = [
    Name(".bashrc", ".bashrc", local_as="_.bashrc"),
    Name("..hidden", "..hidden", local_as="_..hidden"),
    Name("-rf", "-rf", local_as="_-rf"),
    Name("--help.txt", "--help.txt", local_as="_--help.txt"),
    Name("  padded.txt  ", "__padded.txt__", "padded.txt"),
    Name("\u200d.profile", "_.profile", local_as="_.profile"),
]

WINDOWS = [
    Name("a<b>c.txt", "a_b_c.txt", local_as="a_b_c.txt"),
    Name("d|e?.txt", "d_e_.txt", local_as="d_e_.txt"),
    Name("star*.txt", "star_.txt", local_as="star_.txt"),
    Name('say "hi".txt', "say__hi_.txt", local_as="say _hi_.txt"),
    Name("e.txt:stream", "e.txt_stream", local_as="e.txt_stream"),
    Name("CON", "CON", local_as="_CON"),
    Name("nul.txt", "nul.txt", local_as="_nul.txt"),
    Name("Aux.c", "Aux.c", local_as="_Aux.c"),
    Name("COM1.tar.gz", "COM1.tar.gz", local_as="_COM1.tar.gz"),
    Name("COM\xb9.txt", "COM_.txt", local_as="_COM\xb9.txt"),
    Name("PRN .txt", "PRN_.txt", local_as="_PRN .txt"),
    Name("com10.txt", "com10.txt"),
    Name("console.txt", "console.txt"),
    Name("trailing dots...", "trailing_dots...", local_as="trailing dots"),
    Name("f. . .", "f._._.", local_as="f"),
]

# 255 characters on the wire, 255 bytes on the disk.
LONG = [
    Name("x" * 255, "x" * 100),
    Name("y" * 300 + ".txt", "y" * 96 + ".txt", "y" * 251 + ".txt"),
    Name("\xe9" * 200 + ".pdf", "_" * 96 + ".pdf", local_as="\xe9" * 125 + ".pdf"),
    Name("\u65e5" * 100 + ".docx", "_" * 95 + ".docx", local_as="\u65e5" * 83 + ".docx"),
    Name("e\u0301" * 120 + ".txt", "e_" * 48 + ".txt", local_as="\xe9" * 120 + ".txt"),
    Name("q\u0301" * 120 + ".txt", "q_" * 48 + ".txt", local_as="q\u0301" * 83 + ".txt"),
    Name(FAMILY * 40 + ".png", "_" * 96 + ".png", local_as=FAMILY * 13 + ".png"),
    Name("z" * 260 + "." + "e" * 40, "z" * 100, "z" * 255),
]

# Each is a collision with the first, on some filesystem.
CASES = [
    Name("Gr\xfc\xdfe.txt", "Gr__e.txt"),
    Name("GR\xdcSSE.TXT", "GR_SSE.TXT"),
    Name("gru\u0308\xdfe.txt", "gru__e.txt", local_as="gr\xfc\xdfe.txt"),
]

NAMES = [
    *PLAIN,
    *LANGUAGES,
    *NORMALISED,
    *EMOJI,
    *INVISIBLE,
    *PATHS,
    *LEADING,
    *WINDOWS,
    *LONG,
    *CASES,
]
