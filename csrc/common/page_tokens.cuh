// The size of a page: the twin of PAGE_TOKENS in oscar_mm/policy.py, which a test compares.
#pragma once

constexpr int PAGE_TOKENS = 128;
