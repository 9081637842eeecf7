"""`metis certificates ...`: a small certificate authority, and the kits that sites and the controller use.

cryptography is loaded only when a command runs.
"""

from __future__ import annotations

import shlex
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metis.cli.options import JsonOption, ProxyOption
from metis.cli.output import add, deployed, note, print_json, say, stdout
from metis.errors import ConfigError
from metis.net import host_and_port

if TYPE_CHECKING:
    from metis.deployment.security.authority import Authority


class Role(str, Enum):
    """Who a certificate is for."""

    learner = "learner"
    controller = "controller"
    admin = "admin"
    viewer = "viewer"


NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the site in the federation.")]
AuthorityOption = Annotated[Path, typer.Option("--ca", metavar="DIR", help="Folder of the CA.")]
DaysOption = Annotated[int, typer.Option("--days", min=1, max=36_500, help="How many days it is valid.")]
KitOption = Annotated[Path | None, typer.Option("--out", metavar="KIT", help="Folder of the kit; by default NAME.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite an existing kit.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        no_args_is_help=True,
        help="Control who may join a federation: create a CA, issue kits for the controller and the sites; renew, "
        "revoke, check.",
    )
    add(group, init, "metis certificates init ca --name 'Heart consortium'")
    add(
        group,
        issue,
        "metis certificates issue main --role controller --host federation.example.org",
        "metis certificates issue hospital-a --request request.csr",
    )
    add(group, request, "metis certificates request hospital-a")
    add(group, renew, "metis certificates renew hospital-a")
    add(group, revoke, "metis certificates revoke hospital-a --kit main")
    add(group, list_, "metis certificates list --json")
    add(group, check, "metis certificates check hospital-a --controller federation.example.org:7443")
    add(group, ckks, "metis certificates ckks keys")
    app.add_typer(group, name="certificates")


def ckks(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder in which both keys are written.")],
) -> None:
    """Make the keys of a federation that encrypts its models (policy.ckks).

    One of the sites runs this. Every learner needs learners.ckks, which opens every model of every site: send it over a
    channel that the controller cannot read, never to the controller. The controller needs controller.ckks, which opens
    nothing.
    """
    from metis.files import write_durable
    from metis.privacy.ckks import new_keys

    secret, public = new_keys()
    folder.mkdir(parents=True, exist_ok=True)
    for_learners, for_controller = folder / "learners.ckks", folder / "controller.ckks"
    for path in (for_learners, for_controller):
        if path.exists():
            raise ConfigError(f"{path} is there already; with another key nobody can read what it encrypted")
    write_durable(for_learners, secret, private=True)
    write_durable(for_controller, public)
    say(f"wrote {for_learners}: for the learners only, who start with --ckks-key {_quoted(for_learners)}")
    say(f"wrote {for_controller}: for the controller, which starts with --ckks-key {_quoted(for_controller)}")


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder in which the CA is created.")],
    name: Annotated[str, typer.Option("--name", metavar="CONSORTIUM", help="Name of the CA.")] = "Metis federation",
    days: DaysOption = 3650,
) -> None:
    """Create the certificate authority (CA) of a federation.

    Anyone with its key can let anyone in: keep the folder on one machine, with a backup, and not on the controller.
    """
    authority = _module().Authority.create(folder, name, days)
    from metis.deployment.security.identity import fingerprint

    end = authority.certificate.not_valid_after_utc
    say(f"made the CA '{name}' in {folder}, valid until {end:%Y-%m-%d}; {folder / 'ca-key.pem'} must stay secret")
    say(
        f"the fingerprint of the CA is {fingerprint(authority.certificate.public_key())}: every site should see "
        "the same in its kit"
    )
    say(f"next, for the controller: metis certificates issue main --ca {_quoted(folder)} --role controller --host HOST")
    say(f"and for every site: metis certificates issue NAME --ca {_quoted(folder)}")


def issue(
    name: NameArgument,
    ca: AuthorityOption = Path("ca"),
    role: Annotated[Role, typer.Option("--role", help="What the certificate is for.")] = Role.learner,
    host: Annotated[
        list[str],
        typer.Option(
            "--host", metavar="HOST", help="Name or address that learners dial, for a controller; may be repeated."
        ),
    ] = [],  # noqa: B006  # typer wants a list
    days: DaysOption = 365,
    request: Annotated[
        Path | None,
        typer.Option(
            "--request", metavar="FILE.csr", help="Sign the key of a site, from its metis certificates request."
        ),
    ] = None,
    out: KitOption = None,
    force: ForceOption = False,
) -> None:
    """Make a kit: the folder that a controller or a learner gets with --identity."""
    module, folder = _module(), out or Path(name)
    from metis.deployment.security.identity import fingerprint

    authority = module.Authority(ca)
    public = None if request is None else module.read_request(request, name)
    home = public is not None and _holds_key(folder, public)  # the request was made on this machine, in this folder
    if not home:
        _check_room(folder, force)
    certificate, key = authority.issue(name, role.value, host, days, public, again=force)
    if public is not None and not home:
        (folder / "key.pem").unlink(missing_ok=True)  # of the kit that --force overwrites
    authority.write_kit(folder, certificate, key)
    end = _end(authority, certificate.not_valid_after_utc)
    say(f"{role.value} '{name}': certificate {certificate.serial_number:x}, valid until {end}")
    if public is not None:
        mark = fingerprint(public)
        say(f"signed the site's key {mark}: compare this fingerprint with the site's, by telephone")
    if home:
        say(f"the kit {folder} is complete")
    elif public is not None:
        say(f"send {folder / 'ca.pem'} and {folder / 'certificate.pem'} to the site; they are not secret")
    else:
        say(f"wrote the kit {folder}; it contains the private key, so send it over a channel that keeps it secret")


def request(
    name: NameArgument,
    out: KitOption = None,
    force: ForceOption = False,
) -> None:
    """At a site: make a key that never leaves it, and a request to be signed by the CA."""
    module, folder = _module(), out or Path(name)
    from metis.deployment.security.identity import fingerprint

    _check_room(folder, force)
    for left in ("certificate.pem", "ca.pem"):
        (folder / left).unlink(missing_ok=True)
    mark = fingerprint(module.make_request(name, folder))
    say(f"made the key {mark} for '{name}'; it stays in {folder / 'key.pem'}")
    say(f"send {folder / 'request.csr'} to the keeper of the CA, who signs it with:")
    say(f"  metis certificates issue {name} --request request.csr")
    say(f"put the ca.pem and certificate.pem that you get back into {folder}")


def renew(
    name: NameArgument,
    ca: AuthorityOption = Path("ca"),
    days: DaysOption = 365,
    out: KitOption = None,
) -> None:
    """Renew a certificate, with the same name, role, hosts and key.

    If the kit is here, its certificate is replaced; a running controller uses it at once. If not, the new certificate
    is written for the site to put into its own kit.
    """
    module, folder = _module(), out or Path(name)
    authority = module.Authority(ca)
    _check_folder(folder)
    certificate = authority.renew(name, days, kit=folder)
    authority.write_kit(folder, certificate, None)
    what = f"certificate {certificate.serial_number:x}, valid until {_end(authority, certificate.not_valid_after_utc)}"
    say(f"renewed '{name}': {what}")
    if (folder / "key.pem").exists():
        say(f"replaced {folder / 'certificate.pem'}; the key is the same")
    else:
        say(f"send {folder / 'certificate.pem'} to the site, to replace the one in its kit; its key stays the same")


def revoke(
    name: NameArgument,
    ca: AuthorityOption = Path("ca"),
    kit: Annotated[
        Path | None, typer.Option("--kit", metavar="KIT", help="Kit of the controller, into which the list is written.")
    ] = None,
) -> None:
    """Lock a site out: revoke all certificates of a name, for ever.

    This takes effect as soon as the list is in the controller's kit; the controller need not be restarted.
    """
    module = _module()
    authority = module.Authority(ca)
    if kit is not None:
        _check_controller(kit, authority)
    revoked = authority.revoke(name)
    if revoked:
        count = len(revoked)
        say(
            f"revoked '{name}': {count} certificate{'s' * (count > 1)} ({', '.join(entry.serial for entry in revoked)})"
        )
    else:
        say(f"'{name}' was already revoked")
    if kit is not None:
        authority.write_revoked(kit)
        say(f"wrote {kit / 'revoked.pem'}; the controller refuses '{name}' from its next call on")
    else:
        say(f"now copy {ca / 'revoked.pem'} into the controller's kit: until then '{name}' is still let in")


def list_(ca: AuthorityOption = Path("ca"), as_json: JsonOption = False) -> None:
    """List what the CA has issued: valid, replaced, expired or revoked."""
    module = _module()
    from metis.deployment.security.identity import now_utc
    from metis.reporting.console import plain_table

    now = now_utc()
    entries = module.Authority(ca).entries()
    rows = []
    for entry in sorted(entries, key=lambda entry: entry.name):  # for one name, the oldest first
        state = module.state(entry, entries, now)
        rows.append(
            {
                "name": entry.name,
                "role": entry.role,
                "serial": entry.serial,
                "valid_until": entry.not_after,
                "state": state,
                "hosts": entry.hosts,
                "issued": entry.issued,
                "revoked": entry.revoked,
            }
        )
    if as_json:
        print_json(rows)
        return
    cells = []
    for row in rows:
        until = datetime.fromisoformat(str(row["valid_until"]))
        words = str(row["state"])
        if row["revoked"]:
            words += f" on {str(row['revoked'])[:10]}"
        elif words == "valid" and (until - now).days < 30:
            words += f", {(until - now).days} days left"
        cells.append([str(row["name"]), str(row["role"]), str(row["serial"]), f"{until:%Y-%m-%d}", words])
    stdout().print(plain_table("Certificates", ["name", "role", "serial", "valid until", "state"], cells))


def check(
    kit: Annotated[Path, typer.Argument(metavar="KIT", help="Folder of the kit.")],
    role: Annotated[Role | None, typer.Option("--role", help="What it will be used for.")] = None,
    controller: Annotated[
        str | None, typer.Option("--controller", metavar="HOST:PORT", help="Also try a connection to this controller.")
    ] = None,
    proxy: ProxyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check whether a kit can be used, and if not, show exactly why.

    Checks the files and the clock only; with --controller also the connection to the controller and its certificate.
    """
    _module()
    from metis.deployment.preflight import preflight
    from metis.deployment.route import route_to
    from metis.deployment.security.identity import Revocations, check_kit, fingerprint, load_kit, moment, warnings

    address = None if controller is None else host_and_port(controller, "federation.example.org:7443")
    route = None if address is None else route_to(*address, proxy)
    held = load_kit(kit)
    check_kit(held, None if role is None else role.value)
    if held.role == "controller" and (reason := Revocations(held).reason(held.serial)):
        raise ConfigError(f"{kit}: {reason}")
    if route is not None:
        preflight(route, held)
    notes = warnings(held)
    if as_json:
        document: dict[str, Any] = {
            "name": held.name,
            "role": held.role,
            "serial": f"{held.serial:x}",
            "valid_until": held.not_after.isoformat(),
            "hosts": held.hosts,
            "ca": fingerprint(held.authority.public_key()),
            "warnings": notes,
        }
        print_json(document)
        return
    through = "" if route is None or route.proxy is None else f", through {route.proxy},"
    dialled = f", to be dialled as {', '.join(held.hosts)}" if held.hosts else ""
    say(f"{kit} is valid: {held}, certificate {held.serial:x}, valid until {moment(held.not_after)}{dialled}")
    say(f"the fingerprint of the CA is {fingerprint(held.authority.public_key())}")
    if route is not None:
        say(f"the controller at {controller}{through} and this kit accept each other")
    for line in notes:
        note(line)


def _module() -> Any:
    return deployed("metis.deployment.security.authority")


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _end(authority: Authority, end: datetime) -> str:
    return f"{end:%Y-%m-%d}" + (" (when the CA expires)" if end == authority.certificate.not_valid_after_utc else "")


def _holds_key(folder: Path, public: Any) -> bool:
    from metis.deployment.security.identity import load_key, public_bytes

    path = folder / "key.pem"
    return path.exists() and public_bytes(load_key(path).public_key()) == public_bytes(public)


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; choose another --out")
    if (folder / "ca-key.pem").exists():
        raise ConfigError(f"{folder} contains a CA; choose another --out for the kit")


def _check_room(folder: Path, force: bool) -> None:
    """A kit is overwritten only with --force, a CA never."""
    _check_folder(folder)
    held = [name for name in ("key.pem", "certificate.pem", "request.csr") if (folder / name).exists()]
    if held and not force:
        raise ConfigError(
            f"{folder} already contains a kit ({', '.join(held)}); choose another --out, or overwrite it with --force"
        )


def _check_controller(kit: Path, authority: Authority) -> None:
    from metis.deployment.security.identity import load_kit, signed_by

    held = load_kit(kit)
    if held.role != "controller" or not signed_by(held.certificate, authority.certificate):
        raise ConfigError(f"{kit} is the kit of {held}, not of a controller of this CA")
