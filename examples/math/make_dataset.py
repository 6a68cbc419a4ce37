"""Write problems.jsonl: 50 word problems of our own in GSM8K's columns, `question` and `answer` (then `#### n`).

`python examples/math/make_dataset.py` gives the same file again.
"""

import json
import random
from pathlib import Path

_NAMES = ("Ada", "Bela", "Chen", "Dana", "Emil", "Fatou", "Gita", "Hugo", "Ines", "Jonas")
_THINGS = ("pears", "stamps", "tiles", "candles", "tickets", "bolts", "postcards", "seedlings")


def main() -> None:
    """Write the file beside this one."""
    draw = random.Random(0)
    kinds = (_shopping, _sharing, _walking, _filling, _saving)
    rows = [kinds[i % len(kinds)](draw) for i in range(50)]
    text = "".join(json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in rows)
    Path(__file__).with_name("problems.jsonl").write_text(text, encoding="utf-8")


def _shopping(draw):
    name, thing = draw.choice(_NAMES), draw.choice(_THINGS)
    count, price, paid = draw.randint(2, 9), draw.randint(2, 9), draw.choice((100, 200))
    cost = count * price
    return (
        f"{name} buys {count} {thing} at {price} crowns each and pays with {paid} crowns. How much change is due?",
        f"The {thing} cost {count} * {price} = {cost} crowns.\nThe change is {paid} - {cost} = {paid - cost} crowns.\n"
        f"#### {paid - cost}",
    )


def _sharing(draw):
    name, thing = draw.choice(_NAMES), draw.choice(_THINGS)
    friends, each, left = draw.randint(2, 8), draw.randint(2, 9), draw.randint(1, 5)
    total = friends * each + left
    return (
        f"{name} has {total} {thing}, keeps {left} and shares the rest evenly among {friends} friends. How many does "
        f"each friend get?",
        f"There are {total} - {left} = {total - left} {thing} to share.\nEach friend gets {total - left} / {friends} = "
        f"{each}.\n#### {each}",
    )


def _walking(draw):
    name = draw.choice(_NAMES)
    morning, evening, days = draw.randint(2, 6), draw.randint(1, 5), draw.randint(3, 7)
    daily = morning + evening
    return (
        f"{name} walks {morning} km every morning and {evening} km every evening. How many kilometres is that in "
        f"{days} days?",
        f"One day is {morning} + {evening} = {daily} km.\n{days} days are {daily} * {days} = {daily * days} km.\n"
        f"#### {daily * days}",
    )


def _filling(draw):
    rate, leak, minutes = draw.randint(6, 12), draw.randint(2, 4), draw.randint(5, 20)
    gain = rate - leak
    return (
        f"A tap gives {rate} litres a minute into a tank that loses {leak} litres a minute. How many litres are in the "
        f"tank after {minutes} minutes, if it was empty?",
        f"The tank gains {rate} - {leak} = {gain} litres a minute.\nIn {minutes} minutes that is {gain} * {minutes} = "
        f"{gain * minutes} litres.\n#### {gain * minutes}",
    )


def _saving(draw):
    name = draw.choice(_NAMES)
    start, weekly, weeks = draw.randint(5, 40), draw.randint(3, 12), draw.randint(4, 12)
    saved = weekly * weeks
    return (
        f"{name} has {start} crowns and puts {weekly} more aside each week. How many crowns are there after "
        f"{weeks} weeks?",
        f"In {weeks} weeks {name} puts {weekly} * {weeks} = {saved} crowns aside.\nTogether that is {start} + {saved} "
        f"= {start + saved} crowns.\n#### {start + saved}",
    )


if __name__ == "__main__":
    main()
