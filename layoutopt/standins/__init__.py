"""What a bundle for a phone brings along, as the phone has only Python, numpy and pyopencl (``layoutopt/phone.py``).

Each module here does what the product needs of a package that is hard to install there, and is used only where that
package is missing: ``structs`` and ``pack`` for msgspec, ``fitting`` for scipy. ``run`` is the script to start.
"""
