# The static base that Coral acts on: a store, roles, one network per region, a launch template per region, and the
# control machine with Prefect on Postgres behind the only public door, the gateway. Nodes are not here: the
# reallocate flow rents and returns them.
module "store" {
  source      = "./modules/store"
  name        = var.name
  home_region = var.home_region
}

module "access" {
  source            = "./modules/access"
  name              = var.name
  fleets            = var.fleets
  bucket_arn        = module.store.bucket_arn
  key_arn           = module.store.key_arn
  agent_secret_arn  = module.store.agent_secret_arn
  regions           = keys(var.regions)
  launch_template   = local.launch_template
  database_user_arn = module.control.database_secret_arn
}

module "region" {
  source   = "./modules/region"
  for_each = var.regions

  name               = var.name
  region             = each.key
  cidr               = each.value.cidr
  zones              = each.value.zones
  node_ami           = each.value.node_ami
  node_volume_gib    = var.node_volume_gib
  node_profile_arn   = module.access.node_profile_arn
  launch_template    = local.launch_template
  fleet_cidrs        = [for r in values(var.regions) : r.cidr]
  log_retention_days = var.log_retention_days
  user_data = templatefile("${path.module}/../cloud-init/node.yaml", {
    bucket              = module.store.bucket
    home_region         = var.home_region
    coordinator_address = local.coordinator_address
    agent_secret_arn    = module.store.agent_secret_arn
  })
}

module "control" {
  source = "./modules/control"

  name                  = var.name
  region                = var.home_region
  vpc_id                = module.region[var.home_region].vpc_id
  public_subnets        = module.region[var.home_region].public_subnets
  private_subnets       = module.region[var.home_region].private_subnets
  gateway_ingress_cidrs = var.gateway_ingress_cidrs
  certificate_arn       = var.gateway_certificate_arn
  ami                   = var.control_ami
  instance_type         = var.control_instance_type
  address               = local.coordinator_address
  profile               = module.access.flow_profile
  fleet_cidrs           = [for r in values(var.regions) : r.cidr]
  log_bucket            = module.store.log_bucket
  key_arn               = module.store.key_arn
  store                 = "s3://${module.store.bucket}/coral"
  coral_version         = var.coral_version
}

# Agents in other regions reach the coordinator over private addresses.
resource "aws_vpc_peering_connection" "home" {
  for_each    = local.away
  region      = var.home_region
  vpc_id      = module.region[var.home_region].vpc_id
  peer_vpc_id = module.region[each.key].vpc_id
  peer_region = each.key
  tags        = { Name = "${var.name}-${each.key}" }
}

resource "aws_vpc_peering_connection_accepter" "away" {
  for_each                  = local.away
  region                    = each.key
  vpc_peering_connection_id = aws_vpc_peering_connection.home[each.key].id
  auto_accept               = true
  tags                      = { Name = "${var.name}-home" }
}

resource "aws_route" "to_away" {
  for_each                  = local.away
  region                    = var.home_region
  route_table_id            = module.region[var.home_region].private_route_table
  destination_cidr_block    = each.value.cidr
  vpc_peering_connection_id = aws_vpc_peering_connection.home[each.key].id
}

resource "aws_route" "to_home" {
  for_each                  = local.away
  region                    = each.key
  route_table_id            = module.region[each.key].private_route_table
  destination_cidr_block    = var.regions[var.home_region].cidr
  vpc_peering_connection_id = aws_vpc_peering_connection_accepter.away[each.key].vpc_peering_connection_id
}

locals {
  away            = { for name, region in var.regions : name => region if name != var.home_region }
  launch_template = "${var.name}-node"
  # The tenth address of the first private subnet (see modules/region), known before the machine exists.
  coordinator_address = cidrhost(cidrsubnet(var.regions[var.home_region].cidr, 4, 8), 10)
}
