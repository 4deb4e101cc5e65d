"""Operations on pages: pack, unpack, and attention over packed pages."""
