"""Sizes as users write them."""

import pytest

from polyneuron.errors import ConfigError
from polyneuron.sizes import parse_size, show_size


class TestParseSize:
    @pytest.mark.parametrize(
        ("text", "num_bytes"),
        [
            ("3GiB", 3 << 30),
            ("3G", 3 << 30),
            ("3g", 3 << 30),
            ("3000MB", 3_000_000_000),
            ("1.5 GiB", 3 << 29),
            ("512K", 512 << 10),
            ("4096", 4096),
            ("75%", 750),
        ],
    )
    def test_reads_what_users_write(self, text: str, num_bytes: int) -> None:
        assert parse_size(text, "--memory", whole_bytes=1000) == num_bytes

    @pytest.mark.parametrize("text", ["", "lots", "-3G", "3X", "GiB", "3 G B", "1e9"])
    def test_refuses_the_rest_naming_the_flag(self, text: str) -> None:
        with pytest.raises(ConfigError, match="--memory"):
            parse_size(text, "--memory", whole_bytes=1000)

    def test_share_needs_a_whole(self) -> None:
        with pytest.raises(ConfigError, match="share"):
            parse_size("75%", "--memory")


def test_show_size_changes_unit_at_ten_gib() -> None:
    assert show_size(812 << 20) == "812 MiB"
    assert show_size(20 << 30) == "20.0 GiB"
