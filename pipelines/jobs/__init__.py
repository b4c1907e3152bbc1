"""The work behind the commands of `edje-index`, such as the build of an index. This
package does not depend on the command line.
"""

from __future__ import annotations
