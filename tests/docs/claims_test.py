#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The check of the documentation's numbers refuses what a forger would write, on the page and in the claim alike."""

import copy
import sys
import unittest

import claims

LEARNING, SPEED = "docs/results/learning.md", "docs/results/speed.md"
RATIO = f"{claims.tables.hook('lamina, R = 0.95').seconds / claims.tables.hook('DDP, no hook').seconds:.2f}"
FORGERIES = {
    "the direction": (SPEED, "74.0 % less time", "74.0 % more time"),
    "the unit": (SPEED, "74.0 % less", "74.0 ms less"),
    "the row": (LEARNING, "78.96 % of the test images, and dense 78.77 %", "78.77 % of the test images, and dense 78.96 %"),
    "the rounding": (SPEED, f"takes {RATIO} of the time of DDP's", f"takes {float(RATIO) - 0.01:.2f} of the time of DDP's"),
    "the baseline": (SPEED, f"{RATIO} of the time of DDP's step", f"{RATIO} of the time of PowerSGD's step"),
    "the count of seeds": (LEARNING, "dense 78.77 %, over five seeds", "dense 78.77 %, over six seeds"),
    "a number more": (SPEED, f"{RATIO} of the time of DDP's step", f"{RATIO} of the time of DDP's step, and 0.31 of PowerSGD's"),
}


class Forged(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.read = claims.read()

    def test_each_is_refused(self):
        for what, (page, text, forged) in FORGERIES.items():
            of, pages = copy.deepcopy(self.read)
            # The page has the text over two lines where it is long.
            pages[page] = claims.prose(pages[page])
            self.assertEqual(pages[page].count(text), 1, what)
            pages[page] = pages[page].replace(text, forged)
            for claim in of["claim"]:
                if claim["page"] == page:
                    claim["text"] = claim["text"].replace(text, forged)
            with self.subTest(what):
                self.assertTrue(any(problem.startswith(page) for problem in claims.check(of, {page: pages[page]})
                                    if "of a claim, is not there" not in problem))

    def test_a_cell_of_a_table_is_refused(self):
        text = self.read[1][SPEED]
        self.assertEqual(claims.tables.filled(text), text)
        forged = text.replace(f"| {RATIO} |", "| 0.01 |", 1)
        self.assertNotEqual(forged, text)
        self.assertEqual(claims.tables.filled(forged), text)

    def test_a_number_without_a_claim_is_refused(self):
        page = "docs/results/index.md"
        for sentence in ("It takes 0.3 of that.", "It is 4 % quicker.", "It needs 12 ms.", "It is 3 × as quick.", "It was seen on seven seeds."):
            self.assertEqual(len(claims.check({"claim": [], "rows": {}, "settings": []}, {page: sentence})), 1, sentence)
        for sentence in ("Four workers at 1 Gb/s.", "Take `0.3`.", "| 0.3 |", "```\n0.3\n```", "Images of 64 × 64 pixels.", "[a](b0.3)"):
            self.assertEqual(claims.check({"claim": [], "rows": {}, "settings": []}, {page: sentence}), [], sentence)


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    unittest.main()
