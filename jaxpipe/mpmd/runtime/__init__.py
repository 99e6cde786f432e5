"""Compiles and executes the instructions of a step, and moves arrays between ranks."""

from ._rendezvous import Transport as Transport
from ._rendezvous import check_agreement as check_agreement
from ._rendezvous import check_same_program as check_same_program
from ._rendezvous import open_transport as open_transport
from ._session import CompileHandshake as CompileHandshake
from ._session import Session as Session
from ._session import open_session as open_session
from ._transfers import Spec as Spec
from ._transfers import abbreviate as abbreviate
from ._transfers import layout as layout
from ._transfers import mover as mover
from ._transfers import receiver as receiver
from ._transfers import sender as sender
from ._watchdog import MpmdError as MpmdError
from ._watchdog import Watchdog as Watchdog
from ._watchdog import resolve as resolve
from ._watchdog import start_watchdog as start_watchdog
from ._watchdog import stop as stop
from ._watchdog import wait as wait
from ._watchdog import watch as watch
