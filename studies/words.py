"""Numbers in words, the same on the screen and in reports."""


def seconds(value: float) -> str:
    """`350 ms`, `2.1 s`."""
    return f"{value * 1e3:.3g} ms" if value < 1.0 else f"{value:,.3g} s"


def duration(value: float) -> str:
    """Seconds in the unit that suits them: `97 min`, `5.7 h`."""
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if value >= 2.0 * length:
            return f"{value / length:,.3g} {unit}"
    return seconds(value)


def share(value: float) -> str:
    """`97.12%`; one digit more near one."""
    return f"{value:.2%}" if value < 0.999 else f"{value:.3%}"


def usd(value: float) -> str:
    """Whole dollars from a hundred on, three digits below."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.3g}"
