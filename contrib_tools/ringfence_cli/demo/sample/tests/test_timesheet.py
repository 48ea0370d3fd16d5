import unittest

from timesheet import EntryError, format_duration, parse_duration, parse_entries, parse_entry, render, totals

WEEK = """\
# first week of March
2026-03-02 09:00-10:30 garden: plant the beans
2026-03-02 11:00-12:15 house: paint the door

2026-03-03 08:00-08:45 garden: water
"""


class DurationTest(unittest.TestCase):
    def test_durations_are_read(self):
        for text, minutes in (("1h30m", 90), ("2h", 120), ("45m", 45), (" 0m ", 0)):
            self.assertEqual(parse_duration(text), minutes)

    def test_what_is_no_duration_is_refused(self):
        for text in ("", "xh", "90", "1h 30m", "-5m"):
            with self.assertRaises(ValueError):
                parse_duration(text)

    def test_durations_are_written_as_they_are_read(self):
        for minutes in (0, 1, 59, 60, 61, 90, 120, 1439):
            self.assertEqual(parse_duration(format_duration(minutes)), minutes)

    def test_less_than_nothing_is_no_duration(self):
        with self.assertRaises(ValueError):
            format_duration(-1)


class EntryTest(unittest.TestCase):
    def test_an_entry_is_read(self):
        entry = parse_entry("2026-03-02 09:00-10:30 garden: plant the beans")
        self.assertEqual((entry.project, entry.note, entry.minutes), ("garden", "plant the beans", 90))

    def test_the_line_of_a_mistake_is_named(self):
        with self.assertRaises(EntryError) as raised:
            parse_entries("2026-03-02 09:00-10:30 garden: x\nnonsense\n")
        self.assertEqual(raised.exception.number, 2)

    def test_an_hour_that_there_is_not_is_refused(self):
        with self.assertRaises(EntryError):
            parse_entry("2026-03-02 09:00-25:30 garden: x")

    def test_a_night_shift_ends_on_the_next_day(self):
        entry = parse_entry("2026-03-02 22:30-01:15 bakery: bread")
        self.assertEqual(format_duration(entry.minutes), "2h45m")


class ReportTest(unittest.TestCase):
    def test_the_longest_comes_first(self):
        self.assertEqual(totals(parse_entries(WEEK)), {"garden": 135, "house": 75})

    def test_projects_of_the_same_length_are_sorted_by_name(self):
        lines = "2026-03-02 09:00-10:00 b: x\n2026-03-02 10:00-11:00 a: x\n"
        self.assertEqual(list(totals(parse_entries(lines))), ["a", "b"])

    def test_the_report_is_aligned(self):
        self.assertEqual(render(parse_entries(WEEK)), "garden  2h15m\nhouse   1h15m\ntotal   3h30m\n")


if __name__ == "__main__":
    unittest.main()
